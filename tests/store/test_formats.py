"""Dumps of every format into every other: exact, in order, and with nothing assumed that was not said."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from capture_hooks import CaptureSpec
from capture_hooks.capture import find_anatomy
from capture_hooks.capture.fingerprint import TargetFingerprint
from capture_hooks.errors import ConventionError, SpecError, StoreError
from capture_hooks.interop.dumps import FORMATS, Declared, convert_dump, describe, recognised
from capture_hooks.interop.dumps.contract import DumpPlan, Facts, Rows
from capture_hooks.interop.dumps.convert import same_losses
from capture_hooks.plugins import registry
from capture_hooks.store import Dump, Example, Examples, ModelStates, write_dump

HIDDEN, LAYERS, VOCAB = 8, 6, 50
#: Formats that can hold each norm state.
HOLD = {
    "unnormed": ("capture-hooks", "speculators", "speculators-v1", "vllm", "modelopt"),
    "normed": ("capture-hooks", "speculators-v0", "specforge", "specforge-gz", "modelopt"),
}
PAIRS = [
    (last, first, second)
    for last, names in HOLD.items()
    for first, second in itertools.combinations(names, 2)
]


class Held:
    """Sequences in memory, as a source."""

    def __init__(self, sequences):
        self.sequences = sequences
        first = sequences[0]
        self.facts = Facts(
            str(first.last.dtype).removeprefix("torch."), first.inputs.shape[1], first.last.shape[1]
        )

    def __len__(self):
        return len(self.sequences)

    def place(self, index):
        return f"sequence {index}"

    def notes(self):
        return ()

    def tokens(self, index):
        return self.sequences[index].token_ids, self.sequences[index].loss_mask

    def rows(self, index):
        return self.sequences[index]


def sequences(lengths, slots=3, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)

    def states(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    return [
        Rows(
            place=f"sequence {index}",
            token_ids=torch.randint(VOCAB, (length,), generator=random),
            loss_mask=torch.rand(length, generator=random) < 0.6,
            inputs=states(length, slots * HIDDEN),
            last=states(length, HIDDEN),
        )
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny llama whose final norm is not the identity, by path."""
    place = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=12,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(HIDDEN) + 0.5)
    model.save_pretrained(place)
    return str(place)


def points(slots):
    return CaptureSpec.parse(", ".join(f"post.{k}" for k in range(slots)))


def write(name, directory, held, last, target, slots=3):
    """A dump of that format, written by its own writer."""
    end = "" if last == "normed" else f" -> post.{LAYERS - 1}"
    spec = CaptureSpec.parse(f"{points(slots)}{end}")
    if not FORMATS[name].resumes:
        directory.mkdir()
    lengths = tuple(len(one.token_ids) for one in held)
    FORMATS[name].write(
        directory, Held(held), DumpPlan(lengths, last, "test", spec, target, "test", "0" * 64)
    )
    return directory


def stated(name, last, target, slots=3, /, **more):
    """What a user of that dump has to say, and no more, to make it one of ours."""
    given = {"spec": points(slots), "target": target, "pickles": FORMATS[name].pickles} | more
    if name == "vllm":
        given = {"last": last, "masks": "all"} | given
    return Declared(**given)


def assert_same(directory, held, masks=True):
    name = recognised(directory).name
    opened = FORMATS[name].open(directory)
    assert len(opened) == len(held)
    for index, wrote in enumerate(held):
        read = opened.rows(index)
        for part in ("token_ids", "inputs", "last", *(["loss_mask"] if masks else [])):
            ours, theirs = getattr(read, part), getattr(wrote, part)
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs), (name, index, part)


@pytest.mark.parametrize(("last", "first", "second"), PAIRS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    slots=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**32),
)
def test_there_and_back_again(tmp_path_factory, target, last, first, second, lengths, slots, dtype, seed):
    if {"specforge", "specforge-gz"} & {first, second}:
        slots = 3
    held = sequences(lengths, slots, dtype, seed)
    place = tmp_path_factory.mktemp("dumps")
    write(first, place / "a", held, last, target, slots)
    masks = "vllm" not in (first, second)
    for origin, to in (("a", second), ("b", first)):
        source = place / origin
        needed = stated(recognised(source).name, last, target, slots)
        if FORMATS[recognised(source).name].says_points:
            needed = Declared()
        result = convert_dump(source, place / chr(ord(origin) + 1), to=to, declared=needed)
        assert (result.sequences, result.tokens) == (len(lengths), sum(lengths))
        assert recognised(place / chr(ord(origin) + 1)).name == to
        assert_same(place / chr(ord(origin) + 1), held, masks)


def test_every_format_is_told_from_every_other(tmp_path, target):
    held = sequences([5, 3])
    for last, names in HOLD.items():
        for name in names:
            directory = write(name, tmp_path / f"{name}-{last}", held, last, target)
            assert [f.name for f in registry().formats.values() if f.recognises(directory)] == [name]
    assert dict(registry().formats).keys() == FORMATS.keys()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "capture-hooks"])
def test_the_same_dump_gives_the_same_bytes(tmp_path, target, name):
    last = next(last for last, names in HOLD.items() if name in names)
    ours = write("capture-hooks", tmp_path / "ours", sequences([5, 3, 9]), last, target)
    contents = []
    for out in ("a", "b"):
        convert_dump(ours, tmp_path / out, to=name)
        files = sorted(path for path in (tmp_path / out).rglob("*") if path.is_file())
        contents.append([(str(path.relative_to(tmp_path / out)), path.read_bytes()) for path in files])
    assert contents[0] == contents[1]


def test_files_come_in_the_order_of_their_numbers(tmp_path, target):
    held = sequences(range(1, 13))
    directory = write("speculators-v1", tmp_path / "v1", held, "unnormed", target)
    assert (directory / "data_10.pt").exists()
    assert_same(directory, held)


# -- the norm ---------------------------------------------------------------------------------------------


def test_the_target_s_own_norm_is_applied_in_float32_and_rounded_once(tmp_path, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    for dtype in (torch.float32, torch.bfloat16):
        held = sequences([7, 4], dtype=dtype)
        ours = write("capture-hooks", tmp_path / f"ours-{dtype}", held, "unnormed", target)
        out = tmp_path / f"out-{dtype}"
        result = convert_dump(ours, out, to="specforge", declared=Declared(target=target))
        assert any("final norm was applied in float32" in note for note in result.notes)
        opened = FORMATS["specforge"].open(out)
        for index, wrote in enumerate(held):
            with torch.no_grad():
                expected = model.model.norm(wrote.last.float()).to(dtype)
            assert torch.equal(opened.rows(index).last, expected)
            assert torch.equal(opened.rows(index).inputs, wrote.inputs)


@pytest.mark.parametrize(("last", "to"), [("unnormed", "specforge"), ("unnormed", "speculators-v0")])
def test_a_norm_needs_the_target(tmp_path, target, last, to):
    ours = write("capture-hooks", tmp_path / "ours", sequences([5]), last, target)
    with pytest.raises(StoreError, match="--target MODEL names the model whose final norm"):
        convert_dump(ours, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["speculators", "speculators-v1", "vllm"])
def test_a_norm_is_not_undone(tmp_path, target, to):
    ours = write("capture-hooks", tmp_path / "ours", sequences([5]), "normed", target)
    with pytest.raises(StoreError, match="a norm cannot be undone"):
        convert_dump(ours, tmp_path / "out", to=to, declared=Declared(target=target))


@pytest.mark.parametrize("name", ["modelopt", "vllm"])
def test_a_norm_state_that_no_file_says_is_asked_for(tmp_path, target, name):
    directory = write(name, tmp_path / "d", sequences([5, 2]), "unnormed", target)
    for path in directory.glob("*.pt"):
        content = torch.load(path)
        del content["hidden_states_prenorm"]
        torch.save(content, path)
    needed = stated(name, "unnormed", target, last=None)
    with pytest.raises(StoreError, match="--last normed, or --last unnormed"):
        convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=needed)
    for last, end in (("normed", "final_norm"), ("unnormed", f"post.{LAYERS - 1}")):
        convert_dump(
            directory, tmp_path / last, to="capture-hooks", declared=stated(name, last, target, last=last)
        )
        manifest = Dump.open(tmp_path / last).manifest
        assert (manifest.target_normed, str(manifest.spec.target)) == (last == "normed", end)


def test_a_file_that_says_its_norm_state_is_not_contradicted(tmp_path, target):
    directory = write("modelopt", tmp_path / "d", sequences([5]), "unnormed", target)
    with pytest.raises(StoreError, match="itself says that its last hidden state is unnormed, not normed"):
        convert_dump(
            directory,
            tmp_path / "out",
            to="capture-hooks",
            declared=stated("modelopt", "normed", target, last="normed"),
        )


def test_a_library_s_reading_is_overruled_only_by_a_statement_and_said(tmp_path, target):
    directory = write("specforge", tmp_path / "d", sequences([5]), "normed", target)
    declared = stated("specforge", "unnormed", target, last="unnormed")
    result = convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=declared)
    assert any("SpecForge itself takes it for normed" in note for note in result.notes)
    assert Dump.open(tmp_path / "out").manifest.target_normed is False


# -- points -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((1, 2, 3), f"pre.1, pre.2, pre.3 -> post.{LAYERS - 1}"),
        ((1, 2, 3, LAYERS), f"pre.1, pre.2, pre.3 -> post.{LAYERS - 1}"),
    ],
)
def test_ids_name_the_points_by_their_convention(tmp_path, target, ids, expected):
    directory = write("vllm", tmp_path / "d", sequences([5]), "unnormed", target)
    last = "unnormed" if len(ids) == 3 else None
    declared = Declared(ids=ids, written_for="vllm", last=last, masks="all", target=target)
    convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=declared)
    spec = Dump.open(tmp_path / "out").manifest.spec
    assert spec.resolve(LAYERS) == CaptureSpec.parse(expected).resolve(LAYERS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"spec": None}, StoreError, "does not say which points"),
        ({"target": None}, StoreError, "--target MODEL says which one"),
        ({"spec": None, "ids": (1, 2, 3)}, StoreError, "--written-for names the convention"),
        ({"ids": (1, 2, 3), "written_for": "vllm"}, StoreError, "points are stated once"),
        ({"spec": None, "ids": (1, 2), "written_for": "vllm"}, StoreError, "are 2 points to vllm"),
        ({"spec": None, "ids": (1, 2, 99), "written_for": "vllm"}, ConventionError, "99"),
        ({"spec": points(2)}, StoreError, "names 2 points, but the dump's inputs are 24 columns wide"),
        ({"spec": CaptureSpec.parse("post.0, post.1, post.6")}, SpecError, "outside a model of 6 layers"),
        (
            {"spec": CaptureSpec.parse("post.0, post.1, post.2 -> post.-1")},
            StoreError,
            "unnormed stream, but --last says normed",
        ),
        ({"spec": CaptureSpec.parse("post.0, post.1, post.2 -> post.3")}, StoreError, "end of the stream"),
    ],
)
def test_what_must_be_said_for_ours_is_asked_for(tmp_path, target, changes, error, message):
    directory = write("specforge", tmp_path / "d", sequences([5]), "normed", target)
    declared = stated("specforge", "normed", target, **({"last": "normed"} | changes))
    with pytest.raises(error, match=message):
        convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=declared)
    assert not (tmp_path / "out").exists()


def test_points_that_the_dump_says_are_not_contradicted(tmp_path, target):
    ours = write("capture-hooks", tmp_path / "ours", sequences([5]), "unnormed", target)
    declared = Declared(spec=CaptureSpec.parse("post.0, post.2, post.1"), target=target)
    with pytest.raises(StoreError, match=r"itself says that its points are post\.0, post\.1, post\.2"):
        convert_dump(ours, tmp_path / "out", to="vllm", declared=declared)


# -- masks ------------------------------------------------------------------------------------------------


def losses(mask, lag, tokens):
    """Which x[p] a trainer of that lag counts: each head row t predicts x[t+2], the last one x[T]."""
    last = tokens - 1 if lag == 0 else tokens  # ours has no mark for what follows the last token
    return {p for p in range(2, last + 1) if 0 <= p - lag < tokens and bool(mask[p - lag])}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 2), st.integers(0, 2))
def test_moved_marks_count_the_same_predictions_or_are_refused(bits, lag, new_lag):
    mask = torch.tensor(bits)
    wanted = losses(mask, lag, len(bits))
    try:
        moved = same_losses(mask, lag, new_lag, "here")
    except StoreError:
        assert new_lag == 0
        assert len(bits) in wanted
        return
    assert losses(moved, new_lag, len(bits)) == wanted


@pytest.mark.parametrize(("name", "lag"), [("capture-hooks", 0), ("speculators", 1), ("specforge", 2)])
def test_marks_stay_or_losses_stay(tmp_path, target, name, lag):
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 0]).bool()
    held = [dataclasses.replace(one, loss_mask=mask) for one in sequences([9])]
    last = "normed" if name == "specforge" else "unnormed"
    source = write("modelopt", tmp_path / "d", held, last, target)
    for keep in ("marks", "losses"):
        declared = stated("modelopt", last, target, keep=keep)
        result = convert_dump(source, tmp_path / keep, to=name, declared=declared)
        found = FORMATS[name].open(tmp_path / keep).tokens(0)[1]
        if keep == "losses":
            assert losses(found, lag, 9) == losses(mask, 1, 9)
        else:
            assert torch.equal(found, mask)
        assert any("weights the prediction" in n or "marks are moved" in n for n in result.notes) == (
            lag != 1
        )


def test_a_loss_that_ours_cannot_mark_is_refused_where_losses_are_to_stay(tmp_path, target):
    mask = torch.tensor([0, 0, 1, 1, 1]).bool()
    held = [dataclasses.replace(one, loss_mask=mask) for one in sequences([5])]
    source = write("modelopt", tmp_path / "d", held, "normed", target)
    declared = stated("modelopt", "normed", target, keep="losses")
    with pytest.raises(StoreError, match=r"00000000\.pt: its mask counts the prediction of what follows"):
        convert_dump(source, tmp_path / "out", to="capture-hooks", declared=declared)
    assert not (tmp_path / "out").exists()


def test_masks_that_are_not_there_are_asked_for(tmp_path, target):
    held = sequences([5, 3])
    directory = write("vllm", tmp_path / "d", held, "unnormed", target)
    with pytest.raises(StoreError, match=r"00000000\.safetensors has no loss mask; .*--masks all"):
        convert_dump(directory, tmp_path / "out", to="speculators", declared=Declared(last="unnormed"))
    convert_dump(
        directory, tmp_path / "all", to="speculators", declared=Declared(last="unnormed", masks="all")
    )
    assert all(bool(FORMATS["speculators"].open(tmp_path / "all").tokens(i)[1].all()) for i in range(2))


def test_masks_come_from_the_record_of_the_same_ids(tmp_path, target):
    held = sequences([5, 3, 4])
    assert all(bool(one.loss_mask.any()) for one in held)  # data is refused where nothing is to be learnt
    directory = write("vllm", tmp_path / "d", held, "unnormed", target)
    lines = [
        f'{{"input_ids": {one.token_ids.tolist()}, "loss_mask": {one.loss_mask.int().tolist()}}}\n'
        for one in reversed(held)
    ]
    (tmp_path / "data.jsonl").write_text("".join(lines))
    declared = stated("vllm", "unnormed", target, masks=tmp_path / "data.jsonl")
    convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=declared)
    assert_same(tmp_path / "out", held)
    (tmp_path / "data.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(StoreError, match=r"00000000\.safetensors: no record of .* the same token ids"):
        convert_dump(directory, tmp_path / "out2", to="capture-hooks", declared=declared)
    assert not (tmp_path / "out2").exists()


# -- ours -------------------------------------------------------------------------------------------------


def test_a_converted_dump_is_the_dump_it_came_from_but_for_greedy_tokens(tmp_path, target):
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    random = torch.Generator().manual_seed(1)
    examples = Examples(
        "talks",
        tuple(
            Example(torch.randint(VOCAB, (n,), generator=random), torch.rand(n, generator=random) < 0.5, "x")
            for n in (9, 4, 12)
        ),
    )
    write_dump(ModelStates(model, points(3), examples), tmp_path / "made")
    convert_dump(tmp_path / "made", tmp_path / "modelopt", to="modelopt")
    declared = stated("modelopt", "normed", target)
    convert_dump(tmp_path / "modelopt", tmp_path / "back", to="capture-hooks", declared=declared)
    made, back = Dump.open(tmp_path / "made"), Dump.open(tmp_path / "back", points(3), verify=True)
    assert back.manifest.fingerprint == made.manifest.fingerprint == TargetFingerprint.of(find_anatomy(model))
    assert (back.manifest.data.digest, back.manifest.spec) == (made.manifest.data.digest, made.manifest.spec)
    assert back.manifest.argmax is False
    for one, other in zip(made, back, strict=True):
        assert other.argmax is None
        for part in ("states", "target", "token_ids", "loss_mask"):
            assert torch.equal(getattr(one, part), getattr(other, part))


def test_an_interrupted_conversion_goes_on(tmp_path, target, monkeypatch):
    monkeypatch.setattr("capture_hooks.store.writing.SHARD_BYTES", 1200)
    held = sequences([5, 6, 7, 8, 3])
    directory = write("modelopt", tmp_path / "d", held, "normed", target)
    declared, seen = stated("modelopt", "normed", target), []

    class StopError(Exception):
        pass

    def stop(done, total):
        seen.append((done, total))
        if done == 4:
            raise StopError

    with pytest.raises(StopError):
        convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=declared, on_progress=stop)
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("shard-*")}
    assert len(begun) >= 2
    with pytest.raises(StoreError, match="is not finished"):
        Dump.open(tmp_path / "out")
    convert_dump(directory, tmp_path / "out", to="capture-hooks", declared=declared)
    assert all(path.stat().st_mtime_ns == time for path, time in begun.items())
    assert_same(tmp_path / "out", held)
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5)]


# -- the destination --------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path, target):
    held = sequences([5, 6, 7])
    ours = write("capture-hooks", tmp_path / "ours", held, "unnormed", target)

    def stop(done, total):
        raise KeyboardInterrupt

    for name in HOLD["unnormed"][1:]:
        with pytest.raises(KeyboardInterrupt):
            convert_dump(ours, tmp_path / "out", to=name, on_progress=stop)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_what_a_killed_conversion_left_is_replaced_and_nothing_else(tmp_path, target):
    held = sequences([5])
    ours = write("capture-hooks", tmp_path / "ours", held, "unnormed", target)
    left = tmp_path / "out.unfinished"
    left.mkdir()
    (left / "precious.txt").write_text("mine")
    with pytest.raises(StoreError, match="was not begun by a conversion"):
        convert_dump(ours, tmp_path / "out", to="vllm")
    assert (left / "precious.txt").exists()
    (left / ".lock").write_text("")
    convert_dump(ours, tmp_path / "out", to="vllm")
    assert_same(tmp_path / "out", held, masks=False)
    assert not left.exists()


def test_a_destination_in_use_is_refused(tmp_path, target):
    ours = write("capture-hooks", tmp_path / "ours", sequences([5]), "unnormed", target)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    for name in HOLD["unnormed"][1:]:
        with pytest.raises(StoreError, match="is there and not empty"):
            convert_dump(ours, tmp_path / "out", to=name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_three_states_are_specforge_s(tmp_path, target):
    ours = write("capture-hooks", tmp_path / "ours", sequences([5], slots=2), "normed", target, slots=2)
    with pytest.raises(StoreError, match="exactly 3 states"):
        convert_dump(ours, tmp_path / "out", to="specforge")


def test_a_dump_is_not_converted_into_itself(tmp_path, target):
    ours = write("capture-hooks", tmp_path / "ours", sequences([5]), "normed", target)
    with pytest.raises(StoreError, match="is a capture-hooks dump already"):
        convert_dump(ours, tmp_path / "out", to="capture-hooks")


# -- descriptions -----------------------------------------------------------------------------------------


def test_a_description_says_what_is_said_and_how_to_say_the_rest(tmp_path, target):
    for last, names in HOLD.items():
        for name in names:
            directory = write(name, tmp_path / f"{name}-{last}", sequences([5, 3]), last, target)
            found = describe(directory, pickles=True)
            said, unsaid = dict(found.says), dict(found.silent)
            assert found.format == name
            assert said["sequences"] == "2"
            assert said["inputs"] == "24 columns (3 states of 8)"
            assert ("points" in said) == (name == "capture-hooks") != ("points" in unsaid)
            assert ("last hidden state" in said) == (name != "vllm") != ("last hidden state" in unsaid)
            assert ("loss mask" in said) == (name != "vllm") != ("loss mask" in unsaid)
            if name != "vllm":
                assert said["last hidden state"].startswith(last)


def test_a_description_opens_no_pickle_unasked(tmp_path, target):
    directory = write("specforge", tmp_path / "d", sequences([5]), "normed", target)
    found = describe(directory)
    assert "sequences" not in dict(found.says)
    assert "--pickles" in dict(found.silent)["what its files hold"]


def test_what_is_no_dump_is_said_to_be_none(tmp_path):
    for path in (tmp_path, tmp_path / "absent", Path(__file__)):
        with pytest.raises(StoreError, match="a dump is a directory of one of the formats capture-hooks"):
            describe(path)
