"""Converted dumps, read by the other libraries' own data sets; dumps as they write them, read by us."""

import peer
import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks import CaptureSpec
from capture_hooks.capture import find_anatomy
from capture_hooks.interop.dumps import FORMATS, Declared, convert_dump, recognised
from capture_hooks.store import Dump, Example, Examples, ModelStates, write_dump
from capture_hooks.testing import tiny

LAYERS, LENGTHS = 4, (9, 4, 12, 3, 7)
POINTS = "post.0, post.2, post.1"
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def model():
    return tiny.llama(num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def target(model, tmp_path_factory):
    place = tmp_path_factory.mktemp("target")
    model.save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module", params=DTYPES)
def dumps(request, model, tmp_path_factory):
    """Two dumps of a model's own states, by the norm state of their target point."""
    place = tmp_path_factory.mktemp("dumps")
    random = torch.Generator().manual_seed(0)
    examples = Examples(
        "talks",
        tuple(
            Example(
                torch.randint(find_anatomy(model).vocab_size, (length,), generator=random),
                torch.rand(length, generator=random) < 0.6,
                "talks",
            )
            for length in LENGTHS
        ),
    )
    for last, spec in (("normed", POINTS), ("unnormed", f"{POINTS} -> post.-1")):
        write_dump(ModelStates(model, CaptureSpec.parse(spec), examples, dtype=request.param), place / last)
    return {last: Dump.open(place / last) for last in ("normed", "unnormed")}


def peers(environment, worker, **settings):
    @pytest.fixture(scope="module")
    def running():
        one = peer.Peer(environment, worker, **settings)
        yield one
        one.close()

    return running


speculators = peers("speculators", "dump_speculators")
specforge = peers("specforge", "dump_specforge")
modelopt = peers("modelopt", "dump_modelopt")
vllm = peers("vllm", "dump_vllm")


@pytest.fixture(scope="module")
def old_speculators(request):
    home = peer.ROOT / "build" / "speculators" / request.param
    if not (home / ".installed").exists():
        pytest.skip(f"no {home}: make speculators-versions")
    one = peer.Peer("speculators", "dump_speculators_files", SPECULATORS=request.param)
    yield one
    one.close()


def converted(dump, place, to):
    convert_dump(dump.directory, place / to, to=to)
    return place / to


def files(directory, pattern):
    return sorted(map(str, directory.glob(pattern)))


def loaded(out, name, count):
    return [load_file(out / f"{index}.safetensors")[name] for index in range(count)]


def same(found, expected):
    return found.dtype == expected.dtype and torch.equal(found, expected)


# -- ours, read by them -----------------------------------------------------------------------------------


def test_speculators_reads_the_same_tensors_after_its_own_shift(dumps, speculators, tmp_path):
    dump = dumps["unnormed"]
    directory = converted(dump, tmp_path, "speculators")
    assert speculators("read", str(directory), dump.manifest.dtype, str(tmp_path)) == [5, list(LENGTHS)]
    for index, stored in enumerate(dump):
        item = load_file(tmp_path / f"{index}.safetensors")
        assert torch.equal(item["input_ids"], stored.token_ids[1:])
        assert same(item["hidden_states"], stored.states[:-1])
        assert same(item["verifier_last_hidden_states"], stored.target[1:])
        assert torch.equal(item["loss_mask"].bool(), stored.loss_mask[1:])
    assert speculators("check", str(directory)) == {}
    theirs, ours = speculators("frequencies", str(directory), str(tmp_path / "freq.pt"))
    assert theirs == ours != "[]"


@pytest.mark.parametrize(
    ("old_speculators", "version"), [("0.3.0", 0), ("0.3.0", 1), ("0.5.0", 1)], indirect=["old_speculators"]
)
def test_older_speculators_read_their_files(dumps, old_speculators, tmp_path, version):
    dump = dumps["normed" if version == 0 else "unnormed"]
    directory = converted(dump, tmp_path, f"speculators-v{version}")
    paths = [str(directory / f"data_{index}.pt") for index in range(len(dump))]
    assert old_speculators("read", paths, version, dump.manifest.dtype, str(tmp_path)) == 5
    for index, stored in enumerate(dump):
        item = load_file(tmp_path / f"{index}.safetensors")
        assert torch.equal(item["input_ids"], stored.token_ids[1:])
        assert same(item["hidden_states"], stored.states[:-1])
        assert same(item["verifier_last_hidden_states"], stored.target[1:])
        assert torch.equal(item["loss_mask"].bool(), stored.loss_mask[1:])


@pytest.mark.parametrize("to", ["specforge", "specforge-gz"])
def test_specforge_reads_the_same_tensors_after_its_own_shift(dumps, specforge, tmp_path, to):
    dump = dumps["normed"]
    directory = converted(dump, tmp_path, to)
    assert specforge("read", str(directory), str(tmp_path)) == list(LENGTHS)
    for index, stored in enumerate(dump):
        item = {name: tensor[0] for name, tensor in load_file(tmp_path / f"{index}.safetensors").items()}
        assert torch.equal(item["ids"][:-1], stored.token_ids[1:])
        assert same(item["target"][:-1], stored.target[1:])
        assert same(item["states"], stored.states)
        assert torch.equal(item["mask"][:-1].bool(), stored.loss_mask[:-1])  # not shifted, the last cleared
        assert item["mask"][-1] == 0


@pytest.mark.parametrize("last", ["normed", "unnormed"])
def test_modelopt_reads_the_same_tensors(dumps, modelopt, tmp_path, last):
    dump = dumps[last]
    directory = converted(dump, tmp_path, "modelopt")
    assert modelopt("read", files(directory, "*.pt"), str(tmp_path)) == [last == "unnormed"] * 5
    for index, stored in enumerate(dump):
        item = {name: tensor[0] for name, tensor in load_file(tmp_path / f"{index}.safetensors").items()}
        assert torch.equal(item["input_ids"], stored.token_ids)
        assert same(item["base_model_hidden_states"], stored.target)
        assert same(item["aux_hidden_states"], stored.states)
        assert torch.equal(item["loss_mask"].bool(), stored.loss_mask)


def test_vllm_loads_the_same_tensors(dumps, vllm, tmp_path):
    dump = dumps["unnormed"]
    directory = converted(dump, tmp_path, "vllm")
    vllm("read", files(directory, "*.safetensors"), str(tmp_path))
    for index, stored in enumerate(dump):
        item = load_file(tmp_path / f"{index}.safetensors")
        assert torch.equal(item["token_ids"], stored.token_ids)
        assert same(item["hidden_states"][:, :-1].flatten(1), stored.states)
        assert same(item["hidden_states"][:, -1], stored.target)


# -- theirs, read by us -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=DTYPES)
def raw(request, tmp_path_factory):
    """Sequences for a library to write: ids, marks, and K+1 states a token."""
    place = tmp_path_factory.mktemp("raw")
    random = torch.Generator().manual_seed(1)
    for index, length in enumerate(LENGTHS):
        states = torch.randn(length, 4, tiny.HIDDEN, generator=random)
        save_file(
            {
                "ids": torch.randint(tiny.VOCAB, (length,), generator=random),
                "mask": (torch.rand(length, generator=random) < 0.6).long(),
                "states": states.to(getattr(torch, request.param)),
            },
            place / f"{index}.safetensors",
        )
    return place


def assert_ours(raw, directory, out, name, **stated):
    """The dump is recognised, and each sequence of its conversion is that of ``raw``, bit for bit."""
    assert recognised(directory).name == name
    declared = Declared(spec=CaptureSpec.parse(POINTS), pickles=FORMATS[name].pickles, **stated)
    convert_dump(directory, out, to="capture-hooks", declared=declared)
    dump = Dump.open(out, verify=True)
    assert len(dump) == len(LENGTHS)
    for index, stored in enumerate(dump):
        row = load_file(raw / f"{index}.safetensors")
        assert torch.equal(stored.token_ids, row["ids"])
        assert torch.equal(stored.loss_mask, row["mask"].bool())
        assert same(stored.states, row["states"][:, :-1].flatten(1))
        assert same(stored.target, row["states"][:, -1])


def test_a_dump_of_speculators(raw, target, speculators, tmp_path):
    speculators("write", str(raw), str(tmp_path / "d"))
    assert_ours(raw, tmp_path / "d", tmp_path / "ours", "speculators", target=target)


@pytest.mark.parametrize(
    ("old_speculators", "version"), [("0.3.0", 0), ("0.3.0", 1)], indirect=["old_speculators"]
)
def test_files_of_older_speculators(raw, target, old_speculators, tmp_path, version):
    (tmp_path / "d").mkdir()
    old_speculators("write", str(raw), version, str(tmp_path / "d"))
    assert_ours(raw, tmp_path / "d", tmp_path / "ours", f"speculators-v{version}", target=target)


@pytest.mark.parametrize("compressed", [False, True])
def test_features_of_specforge(raw, target, specforge, tmp_path, compressed):
    (tmp_path / "d").mkdir()
    specforge("write", str(raw), str(tmp_path / "d"), compressed)
    name = "specforge-gz" if compressed else "specforge"
    assert_ours(raw, tmp_path / "d", tmp_path / "ours", name, target=target)


@pytest.mark.parametrize(
    ("prenorm", "stated"), [(None, "normed"), (None, "unnormed"), (True, None), (False, None)]
)
def test_a_dump_of_modelopt(raw, target, modelopt, tmp_path, prenorm, stated):
    (tmp_path / "d").mkdir()
    modelopt("write", str(raw), str(tmp_path / "d"), prenorm)
    assert_ours(raw, tmp_path / "d", tmp_path / "ours", "modelopt", target=target, last=stated)
    unnormed = prenorm or stated == "unnormed"
    assert Dump.open(tmp_path / "ours").manifest.target_normed == (not unnormed)
