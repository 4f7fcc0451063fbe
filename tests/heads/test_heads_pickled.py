"""Heads that ``torch.save`` wrote: opened when asked for, bit for bit, and only with tensors in them."""

import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from capture_hooks.cli import main
from capture_hooks.errors import HeadError
from capture_hooks.heads import load_head
from capture_hooks.interop.heads import FORMATS, TargetShape, convert_head
from capture_hooks.interop.heads.open import open_head
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

SPEC = CaptureSpec.parse("post.1, post.3, post.5")
pytestmark = pytest.mark.filterwarnings("ignore::capture_hooks.heads.HeadWarning")


class Harm:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def target():
    return tiny.llama(num_hidden_layers=8)


@pytest.fixture(scope="module")
def eagle(target, tmp_path_factory):
    """A head in EAGLE's layout, as safetensors."""
    from capture_hooks.capture import find_anatomy
    from capture_hooks.heads import make_witness, readout_of, save_head
    from capture_hooks.plugins import registry

    root = tmp_path_factory.mktemp("heads")
    anatomy, provider = find_anatomy(target), registry().heads["eagle3"]
    ids = torch.arange(0, anatomy.vocab_size, 3)
    head = provider.create(provider.config_type(), SPEC, anatomy, readout_of(anatomy, SPEC), ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        tiny.randomise(head)
    sequences = [[(7 * i * i + 3 * i + s) % 250 for i in range(20)] for s in range(4)]
    save_head(head, root / "ours", model=target, witness=make_witness(target, SPEC, sequences))
    convert_head(root / "ours", root / "eagle", to="eagle", target=TargetShape.of_anatomy(anatomy))
    return root / "eagle"


def pickled(eagle, place, write=torch.save, **more):
    """The same head with its tensors in pytorch_model.bin, as the state of a module is saved."""
    place.mkdir()
    (place / "config.json").write_text((eagle / "config.json").read_text())
    tensors = OrderedDict(load_file(eagle / "model.safetensors"))
    tensors._metadata = OrderedDict({"": {"version": 1}})
    write({**tensors, **more} if more else tensors, place / "pytorch_model.bin")
    return place


@pytest.mark.parametrize("save", ["state", "parameters", "shards"])
def test_it_is_the_same_head(tmp_path, target, eagle, save):
    def write(tensors, path):
        if save == "parameters":
            tensors = {
                name: torch.nn.Parameter(t) if t.is_floating_point() else t for name, t in tensors.items()
            }
        if save != "shards":
            torch.save(tensors, path)
            return
        names = {}
        for at, (name, tensor) in enumerate(tensors.items()):
            names[name] = f"pytorch_model-{at:05}.bin"
            torch.save({name: tensor}, path.with_name(names[name]))
        path.with_name("pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))

    place = pickled(eagle, tmp_path / "head", write)
    plain, found = open_head(eagle), open_head(place, pickles=True)
    assert (found.layout, found.tensors) == (plain.layout, plain.tensors)
    ours, theirs = found.read(), plain.read()
    assert same(ours, theirs)
    loaded = load_head(place, target, formats=FORMATS, spec=SPEC, pickles=True)
    expected = load_head(eagle, target, formats=FORMATS, spec=SPEC)
    assert same(loaded.state_dict(), expected.state_dict())
    convert_head(place, tmp_path / "out", to="eagle", written_for="sglang", pickles=True, target=_of(target))
    convert_head(eagle, tmp_path / "expected", to="eagle", written_for="sglang", target=_of(target))
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        tmp_path / "expected/model.safetensors"
    ).read_bytes()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _of(model):
    from capture_hooks.capture import find_anatomy

    return TargetShape.of_anatomy(find_anatomy(model))


def command(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["capture-hooks", *map(str, words)])
    try:
        main()
        code = 0
    except SystemExit as exited:
        code = exited.code or 0
    return code, capsys.readouterr()


def test_every_command_asks_for_the_flag_and_takes_it(tmp_path, monkeypatch, capsys, target, eagle):
    place, model, data = pickled(eagle, tmp_path / "head"), tmp_path / "model", tmp_path / "data.jsonl"
    target.save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    data.write_text('{"text": "a line of words"}\n{"text": "and another one"}\n')
    capsys.readouterr()
    about = ["--written-for", "sglang"]
    start = [
        *about,
        "--init-from",
        place,
        "--steps",
        1,
        "--evaluations",
        0,
        "--held-out",
        0,
        "--device",
        "cpu",
    ]
    commands = (
        (["explain", place, "--target", model, *about], None),
        (["convert", place, tmp_path / "a", "--to", "modelopt", "--target", model, *about], tmp_path / "a"),
        (
            ["train", "--model", model, "--data", data, "--out", tmp_path / "b", *start],
            tmp_path / "b",
        ),
    )
    for words, out in commands:
        code, printed = command(monkeypatch, capsys, *words)
        assert code == 1
        assert "pickles are opened only on request (--pickles)" in printed.err
        assert out is None or not out.exists()
        code, printed = command(monkeypatch, capsys, *words, "--pickles")
        assert code == 0, printed.err
        assert out is None or (out / "model.safetensors").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_runs_something_is_named_and_not_run(tmp_path, eagle, protocol):
    place = pickled(
        eagle,
        tmp_path / "head",
        lambda tensors, path: torch.save(tensors, path, pickle_protocol=protocol),
        extra=Harm(tmp_path / "harm"),
    )
    for _ in range(2):
        with pytest.raises(HeadError, match=r"names posix\.system" if protocol == 2 else "makes objects"):
            open_head(place, pickles=True)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ({"epoch": 3}, "holds a int under 'epoch'"),
        ({"module": {"fc.weight": torch.ones(1)}}, "holds a dict under 'module'"),
        ({"x": torch.ones(2, 2).to_sparse()}, "holds a tensor of torch.float32 under 'x'|names torch"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "holds a tensor of torch.complex64 under 'x'"),
        ({7: torch.ones(2)}, "holds a Tensor|holds a tensor"),
        ({"x": torch.ones(1).expand(1 << 30)}, "more than the file holds"),
        ({f"x{i}": torch.ones(50_000) for i in range(1)}, "no EAGLE-3 head"),
    ],
)
def test_what_is_no_head_is_named(tmp_path, held, words):
    (tmp_path / "config.json").write_text("{}")
    torch.save(held, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match=words):
        open_head(tmp_path, pickles=True)


def test_many_names_of_one_weight(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weight = torch.ones(1000, 1000)
    torch.save({f"fc{i}": weight for i in range(100)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(HeadError, match="claims 400000000 bytes of tensors, more than the file holds"):
        open_head(tmp_path, pickles=True)


def test_which_of_several_files(tmp_path, eagle):
    place = pickled(eagle, tmp_path / "head")
    torch.save({"a": torch.ones(1)}, place / "training_args.bin")
    assert "fc.weight" in open_head(place, pickles=True).tensors
    (place / "pytorch_model.bin").rename(place / "head.bin")
    with pytest.raises(HeadError, match=r"holds 2 pickles \(head\.bin, training_args\.bin\) and no"):
        open_head(place, pickles=True)
    # A safetensors file always goes first, and then no pickle is looked at.
    (place / "model.safetensors").write_bytes((eagle / "model.safetensors").read_bytes())
    (place / "head.bin").write_bytes(b"anything")
    assert "fc.weight" in open_head(place, pickles=True).tensors


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_one_line(tmp_path_factory, eagle, data):
    tensors = load_file(eagle / "model.safetensors")
    content = io.BytesIO()
    torch.save(tensors, content)
    raw = bytearray(content.getvalue())
    kind = data.draw(st.sampled_from(["cut", "flip", "random", "zip", "pickle"]))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "flip":
        for _ in range(data.draw(st.integers(1, 20))):
            # Where it hurts: the zip's directory and the pickle are at the ends.
            at = data.draw(st.integers(0, 4000))
            raw[at if data.draw(st.booleans()) else -1 - at] ^= data.draw(st.integers(1, 255))
    elif kind == "random":
        raw = bytearray(data.draw(st.binary(max_size=300)))
    elif kind == "zip":
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("a/data.pkl", data.draw(st.binary(max_size=100)))
        raw = bytearray(made.getvalue())
    else:
        raw = bytearray(pickle.dumps(data.draw(st.dictionaries(st.text(), st.integers()))))
    place = Path(tmp_path_factory.mktemp("damaged"))
    (place / "config.json").write_text((eagle / "config.json").read_text())
    (place / "pytorch_model.bin").write_bytes(bytes(raw))
    try:
        open_head(place, pickles=True).read()
    except HeadError as error:
        told = str(error)
    else:
        told = ""  # flipped bits may lie in values, or where nobody looks
    assert len(told.splitlines()) <= 1
