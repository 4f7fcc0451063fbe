"""Whatever is typed or read: one clear message, exit 1 or 2, nothing left behind, and never a traceback.

The commands run in this process, so that thousands of argument lists are affordable.  What ends in the last
net of ``cli.main`` ("unexpected ...") fails here too: each error is to be named where it arises.
``CAPTURE_HOOKS_NONSENSE=10000 pytest tests/cli/test_nonsense.py`` tries that many, other ones each time.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import shutil
import signal
import stat
import sys
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_hooks.cli import main
from capture_hooks.cli.app import build
from capture_hooks.testing import tiny
from capture_hooks.testing.nonsense import damaged_json

ASKED = int(os.environ.get("CAPTURE_HOOKS_NONSENSE", "0"))
#: Longest time that one command may take: a pipe that is opened would block for ever.
SECONDS = 60


def trying(examples: int) -> Any:
    return settings(
        max_examples=ASKED or examples,
        derandomize=not ASKED,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


# --------------------------------------------------------------------------------------------- running


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class TooLongError(BaseException):
    """Not an `Exception`: nothing may catch it."""


def _stuck(*_: Any) -> None:
    raise TooLongError


def run(arguments: list[str], stdin: bytes = b"") -> Ended:
    """One command as the console script would run it, in this process."""
    streams = [io.TextIOWrapper(io.BytesIO(given), encoding="utf-8") for given in (stdin, b"", b"")]
    streams[2].reconfigure(errors="backslashreplace")  # as Python's own stderr
    before = sys.stdin, sys.stdout, sys.stderr
    alarm = signal.signal(signal.SIGALRM, _stuck)
    signal.alarm(SECONDS)
    try:
        sys.stdin, sys.stdout, sys.stderr = streams
        main(arguments)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        sys.stdin, sys.stdout, sys.stderr = before
    texts = []
    for stream in streams[1:]:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return Ended(code, *texts)


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and folder, with what changes when it is written."""
    found = {}
    for path in root.rglob("*"):
        about = path.lstat()
        changes = about.st_mtime_ns if stat.S_ISREG(about.st_mode) else 0
        found[str(path.relative_to(root))] = (about.st_mode, about.st_size if changes else 0, changes)
    return found


class Bench:
    """A folder with everything a command wants, made again after each command that wrote in it."""

    def __init__(self, pristine: Path, root: Path) -> None:
        self.pristine, self.root = pristine, root
        self.restore()

    def restore(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.pristine, self.root, symlinks=True, ignore=_pipes)
        os.mkfifo(self.root / "fifo")

    def check(self, arguments: list[str], stdin: bytes = b"") -> Ended:
        before = tree(self.root)
        with contextlib.chdir(self.root):
            done = run(arguments, stdin)
        after = tree(self.root)
        left = {path for path in after | before if after.get(path) != before.get(path)}
        if left:
            self.restore()
        told = f"{' '.join(map(repr, arguments))}: exit {done.code}\n{done.err[-3000:]}"
        assert "Traceback" not in done.err + done.out, told
        assert "error: unexpected " not in done.err, told
        assert done.code in (0, 1, 2), told
        if done.code == 2:
            assert "Usage: capture-hooks" in done.err, told
        if arguments[:1] == ["explain"] and done.out:
            # A report was given, and 1 is its verdict: the page was asked for.
            joined = (word.split("=", 1) if word.startswith("--html=") else [word] for word in arguments)
            words = [part for parts in joined for part in parts]
            left -= {os.path.normpath(page) for word, page in pairwise(words) if word == "--html"}
        if done.code:
            assert not left, f"left behind: {sorted(left)}; {told}"
        return done


def _pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if stat.S_ISFIFO(Path(folder, name).lstat().st_mode)]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nonsense") / "pristine"
    root.mkdir()
    model = tiny.llama(num_hidden_layers=8, max_position_embeddings=64)
    model.save_pretrained(root / "target")
    tiny.tokenizer().save_pretrained(root / "target")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": turns}, {"messages": [*turns, *turns]}, {"prompt_ids": [5, 6], "answer_ids": [7, 8]}]
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    (root / "spec.json").write_text('{"inputs": ["post.0"]}')
    (root / "template.jinja").write_text(tiny.CHATML)
    (root / "folder" / "inner").mkdir(parents=True)
    (root / "empty").write_bytes(b"")
    (root / "empty.jsonl").write_bytes(b"")
    (root / "latin1").write_bytes("é".encode("latin-1"))
    (root / "latin1.jsonl").write_bytes('{"text": "é"}\n'.encode("latin-1"))
    (root / "zeros").write_bytes(bytes(100))
    (root / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00abc")
    (root / "deep.json").write_text("[" * 100_000)
    (root / "digits.json").write_text("[" + "9" * 5000 + "]")
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    common = ["--model", "target", "--data", "data.jsonl", "--spec", "post.0, post.1, post.2"]
    with contextlib.chdir(root):
        for words in (["dump", *common, "--out", "dump"], ["train", *common, "--out", "head", *QUICK]):
            done = run(words)
            assert done.code == 0, done.err
        assert run(["convert", "head", "eagle", "--to", "eagle"]).code == 0
    shutil.rmtree(root / "head.training")
    return root


@pytest.fixture(scope="module")
def bench(pristine: Path) -> Bench:
    return Bench(pristine, pristine.parent / "bench")


# ------------------------------------------------------------------------------- what can be typed

QUICK = ["--steps", "1", "--evaluations", "0", "--ttt-steps", "1", "--batch-tokens", "64", "--held-out", "0"]

#: What makes each command run: an option's or argument's ordinary value, by its name.
ORDINARY = {
    "model": "target",
    "target": "target",
    "data": "data.jsonl",
    "file": "data.jsonl",
    "head": "head",
    "spec": "post.0, post.1, post.2",
    "out": "made",
    "prompt": "Hello",
    "source": "head",
    "destination": "made",
    "to": "eagle",
    "subject": "head",
    "engine": "embedded",
    "max_new_tokens": "4",
    "unfinished": "keep",
}
DTYPES = ["auto", "float32", "float16", "bfloat16", "float64", "int8", "float8_e4m3fn", "complex64", "nn",
          "torch.float32", "__class__", "uint1", "bits8"]  # fmt: skip
OTHERS = {
    "head": ["eagle3", "target", "dump", "folder"],
    "source": ["dump", "target", "folder"],
    "subject": ["dump", "target", "folder"],
    "data": ["dump", "target", "empty.jsonl", "latin1.jsonl", "broken.jsonl.gz", "deep.json", "digits.json"],
    "to": ["capture-hooks", "modelopt", "speculators", "specforge", "vllm"],
    "dump": ["dump", "target", "head"],
    "eval_data": ["dump", "data.jsonl", "target", "deep.json"],
    "init_from": ["head", "dump", "target"],
    "spec": ["eagle3", "@spec.json", "@empty", "@latin1", "@deep.json", "@digits.json", "@fifo", "@folder",
             "@", "post.99", "post.-9", "final_norm", "embed", "post.0, post.0", "in:model", "out:lm_head"],
    "chat_template": ["template.jinja", "latin1", "zeros", "empty", "deep.json"],
    "tree": ["2,2,4", "0,0,0", "1,2", "-1,2,3", "1,1,99999999", "999999,1,1", "a,b,c", "2.5,1,1", "64,64,64"],
    "ids": ["1,2,3", "[0,1,2]", "0", "-1", "1,,2", "1;2", "999999999", "1,1,1"],
    "device": ["cpu", "cpu:0", "cuda", "cuda:99", "meta", "mps", "xpu", "cpu:-1"],
    "dtype": DTYPES,
    "model_dtype": DTYPES,
    "engine": ["sglang", "vllm", "vllm.v1", "sglang==0.5.21", "sglang==x", "embedded"],
    "written_for": ["sglang", "specforge", "vllm", "transformers", "modelopt"],
    "family": ["llama", "qwen3", "deepseek_v3"],
    "layers": ["4", "61"],
    "report_to": ["tensorboard", "wandb", "none", "all", "nope", "mlflow"],
    "split": ["train", "test"],
    "masks": ["all", "data.jsonl"],
    "prompt": ["-", "Hello\nthere"],
    "draft_vocab": ["1", "5", "50", "257"],
    "seed": [str(2**32), str(2**64), str(2**63 - 1), str(-(2**63))],
    "settings": ["--flag", "x=1", "--"],
}  # fmt: skip
TEXTS = [
    *(
        "",
        " ",
        "-1",
        "0",
        "1",
        "1.5",
        "1e400",
        "nan",
        "inf",
        "-inf",
        "9" * 30,
        "abc",
        "null",
        "true",
        "[]",
        "{}",
    ),
    *("[/red]", "[bold]", "%s %d", "é", "\udcff", "\n", "a\tb", "\u202e", "\x1b[31m", "x" * 300, "a/" * 2000),
    *("~", "~nobody/x", ".", "..", "/", "/dev/null", "/dev/full", "/proc/nothing/here", "/sys/x", "fifo"),
    *(
        "dangling",
        "loop",
        "data.jsonl/inside",
        "folder",
        "folder/inner/new",
        "new/inner/made",
        "empty",
        "latin1",
    ),
    *("zeros", "made"),
]
#: Numbers that would only make a command run for days.
ENDLESS = {"steps", "epochs", "max_minutes", "max_new_tokens", "start_timeout"}
HUGE = {"inf", "9" * 30, str(2**31), str(2**63), "1e308", "1e400"}
WHOLE = ["-1", "0", "1", "2", "7", str(2**31), str(2**63), "9" * 30, "-" + "9" * 30, "1.5", "nan", "", "abc"]
REAL = ["-1", "-0.0", "0", "0.5", "1", "2", "1e-320", "1e308", "1e400", "nan", "inf", "-inf", "", "abc"]


@dataclasses.dataclass(frozen=True)
class Word:
    """One option or argument of a command."""

    name: str
    option: str | None
    kind: Any
    required: bool
    many: bool


@dataclasses.dataclass(frozen=True)
class Line:
    """A command with what it takes, read from its signature: new options are tried without a word here."""

    words: tuple[str, ...]
    takes: tuple[Word, ...]


def lines(app: typer.Typer, before: tuple[str, ...] = ()) -> Iterator[Line]:
    for info in app.registered_commands:
        assert info.callback is not None
        hints = get_type_hints(info.callback, include_extras=True)
        takes = []
        for name, parameter in inspect.signature(info.callback).parameters.items():
            if get_origin(hints[name]) is not Annotated:
                continue
            kind, about, *_ = get_args(hints[name])
            if get_origin(kind) in (Union, types.UnionType):
                kind = next(part for part in get_args(kind) if part is not type(None))
            many = get_origin(kind) is list
            kind = get_args(kind)[0] if many else kind
            option = None
            if isinstance(about, typer.models.OptionInfo):
                # In an annotation the first name stands where a default would.
                declared = (about.default, *(about.param_decls or ()))
                given = [word for word in declared if isinstance(word, str) and word.startswith("--")]
                option = given[0] if given else "--" + name.strip("_").replace("_", "-")
            required = parameter.default is inspect.Parameter.empty
            takes.append(Word(name.strip("_"), option, kind, required, many))
        assert info.name is not None
        yield Line((*before, info.name), tuple(takes))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        assert isinstance(group.name, str)
        yield from lines(group.typer_instance, (*before, group.name))


LINES = tuple(line for line in lines(build(["plugins"])))


def ordinary(line: Line, word: Word) -> str | None:
    """The value that makes the command run; None where the option is left out."""
    if line.words == ("train",):
        quick = dict(zip(QUICK[::2], QUICK[1::2], strict=True))
        return {"--model": "target", "--data": "data.jsonl", "--out": "made", **quick}.get(word.option or "")
    if line.words == ("data", "regenerate") and word.name == "out":
        return "made.jsonl"
    if word.required or word.name in ("max_new_tokens", "unfinished", "subject"):
        assert word.name in ORDINARY, f"what is an ordinary {word.name}? add it to ORDINARY"
        return ORDINARY[word.name]
    return None


def nonsense(word: Word) -> st.SearchStrategy[str]:
    special = st.sampled_from([*OTHERS.get(word.name, ["abc"])])
    if get_origin(word.kind) is Literal:
        usual = st.sampled_from([*map(str, get_args(word.kind)), *TEXTS])
    elif word.kind is int:
        usual = st.sampled_from(WHOLE)
    elif word.kind is float:
        usual = st.sampled_from(REAL)
    else:
        usual = st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_characters="\0"), max_size=8))
    if word.name == "set":
        special = pairs(head_settings())
    elif word.name == "trainer":
        special = pairs(trainer_settings())
    elif word.name == "template_arg":
        special = pairs(["messages", "add_generation_prompt", "tools"])
    found = st.one_of(usual, special, special)
    return found.filter(lambda text: text not in HUGE) if word.name in ENDLESS else found


VALUES = [
    *(
        "1",
        "0",
        "-1",
        "1.5",
        "null",
        "true",
        "abc",
        "[]",
        "[1]",
        "{}",
        '{"a": 1}',
        "1e400",
        "NaN",
        "9" * 30,
        "",
    ),
]


def pairs(keys: list[str]) -> st.SearchStrategy[str]:
    chosen = st.tuples(st.sampled_from([*keys, "foo", ""]), st.sampled_from(VALUES))
    return chosen.map("=".join)


def head_settings() -> list[str]:
    from capture_hooks.plugins import registry

    return [field.name for field in dataclasses.fields(registry().heads["eagle3"].config_type)]


def trainer_settings() -> list[str]:
    from transformers import TrainingArguments

    # These take minutes, start processes, or change this process for good.
    left_out = ("torch_compile", "dataloader_num_workers", "full_determinism", "deepspeed", "fsdp")
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    return sorted(name for name in names if not name.startswith(left_out))


@st.composite
def argument_lists(draw: st.DrawFn, line: Line) -> list[str]:
    """What runs, with up to three things set to nonsense, and now and then one left out."""
    changed = {draw(st.sampled_from(line.takes)) for _ in range(draw(st.sampled_from((1, 1, 2, 3))))}
    left_out = draw(st.sampled_from([None] * 40 + [word.name for word in line.takes]))
    options: list[str] = []
    places: list[str] = []
    for word in line.takes:
        if word.name == left_out:
            continue
        value = draw(nonsense(word)) if word in changed and word.kind is not bool else ordinary(line, word)
        if word.kind is bool:
            options += [word.option or ""] if word in changed else []
        elif value is None:
            continue
        elif word.option is None:
            places.append(value)
        else:
            # ``--option=value`` is the only way to give a value that begins with a dash.
            options += [f"{word.option}={value}"] if draw(st.booleans()) else [word.option, value]
    return [*line.words, *draw(st.sampled_from([[*places, *options], [*options, *places]]))]


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-".join(line.words))
def test_whatever_is_typed(bench: Bench, line: Line) -> None:
    ordinary_words = [word for take in line.takes if (value := ordinary(line, take)) is not None
                      for word in ([value] if take.option is None else [take.option, value])]  # fmt: skip
    done = bench.check([*line.words, *ordinary_words])
    if line.words != ("serve",):
        assert done.code == 0, done.err

    @trying(25)
    @given(argument_lists(line))
    def each(arguments: list[str]) -> None:
        bench.check(arguments)

    each()


# -------------------------------------------------------------------------------- what can be read

SHORT = ["--max-new-tokens", "2"]
DATA = ["--model", "target", "--data", "data.jsonl"]
#: What reads each folder.
READERS = {
    "target": [
        ["points", "target"],
        ["explain", "head", "--target", "target"],
        ["explain", "--ids", "1,2,3", "--target", "target"],
        ["dump", *DATA, "--spec", "post.0, post.2", "--out", "made"],
        ["train", *DATA, "--out", "made", *QUICK],
        ["generate", "--model", "target", "--head", "head", "--prompt", "Hi", *SHORT],
        ["eval", *DATA, "--head", "head", *SHORT],
        [
            "convert",
            "eagle",
            "made",
            "--to",
            "capture-hooks",
            "--target",
            "target",
            "--written-for",
            "specforge",
        ],
        ["convert", "dump", "made", "--to", "specforge", "--target", "target"],
    ],
    "head": [
        ["explain", "head"],
        ["explain", "head", "--target", "target"],
        ["generate", "--model", "target", "--head", "head", "--prompt", "Hi", *SHORT],
        ["eval", *DATA, "--head", "head", *SHORT],
        ["convert", "head", "made", "--to", "eagle", "--force"],
        ["convert", "head", "made", "--to", "speculators", "--target", "target", "--force"],
        ["train", *DATA, "--out", "made", "--init-from", "head", *QUICK[:4], *QUICK[6:]],
        ["serve", "head", "--engine", "vllm", "--model", "target"],
        ["serve", "head", "--engine", "sglang", "--model", "target"],
    ],
    "dump": [
        ["explain", "dump"],
        ["train", "--model", "target", "--dump", "dump", "--out", "made", *QUICK],
        ["train", *DATA, "--eval-data", "dump", "--out", "made", *QUICK, "--spec", "post.0, post.1, post.2"],
        ["convert", "dump", "made", "--to", "specforge", "--target", "target"],
        ["dump", *DATA, "--spec", "post.0, post.1, post.2", "--out", "dump"],
    ],
}
CONTENTS = [b"", b"\xff\xfe", bytes(64), b"null", b"[]", b"{}", b'"text"', b"[" * 100_000, b"9" * 5000, b"{"]
#: A count of layers or of a width is no nonsense for being large: it is a model that fits nowhere.
JSON = [
    None,
    True,
    -1,
    0,
    1,
    7,
    0.5,
    "",
    "abc",
    [],
    {},
    [None],
    {"a": None},
    [1, 2],
    "9" * 400,
    "\ud800",
    10**30,
]


@st.composite
def breakages(draw: st.DrawFn, folder: str, files: list[str]) -> tuple[str, Any]:
    """A file of the folder and what happens to it: a function of its path."""
    name = draw(st.sampled_from(files))
    ways = [_cut, _flipped, _replaced]
    if name.endswith(".json"):
        ways += [_json] * 6
    if name.endswith(".safetensors"):
        ways += [_header] * 4
    return name, draw(st.sampled_from(ways))(draw)


def _cut(draw: st.DrawFn) -> Any:
    share = draw(st.floats(0, 1))
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def _flipped(draw: st.DrawFn) -> Any:
    share, bit = draw(st.floats(0, 0.999)), draw(st.integers(0, 7))

    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * len(content))] ^= 1 << bit
        path.write_bytes(content)

    return change


def _replaced(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from([*CONTENTS, "folder", "fifo", "dangling", "gone"]))

    def change(path: Path) -> None:
        path.unlink()
        if isinstance(kind, bytes):
            path.write_bytes(kind)
        elif kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "dangling":
            path.symlink_to("nowhere")

    return change


def _json(draw: st.DrawFn) -> Any:
    return lambda path: path.write_text(json.dumps(draw(damaged_json(json.loads(path.read_text()), JSON))))


def _header(draw: st.DrawFn) -> Any:
    """A safetensors file whose header says something else of the same bytes."""

    def change(path: Path) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.dumps(draw(damaged_json(json.loads(content[8 : 8 + length]), JSON))).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    return change


def test_a_prompt_that_is_no_text_is_one_line(bench: Bench) -> None:
    asked = ["generate", "--model", "target", "--head", "head", "--prompt", "-", *SHORT]
    done = bench.check(asked, stdin=b"caf\xe9")
    assert done.code == 1
    assert "error: the standard input is not UTF-8 text (" in done.err
    assert bench.check(asked, stdin="café".encode()).code == 0


@pytest.mark.parametrize("folder", READERS)
def test_whatever_is_read(bench: Bench, folder: str) -> None:
    place = bench.pristine / folder
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())

    @trying(60)
    @given(breakages(folder, files), st.sampled_from(READERS[folder]))
    def each(broken: tuple[str, Any], arguments: list[str]) -> None:
        name, change = broken
        change(bench.root / folder / name)
        try:
            bench.check(arguments)
        finally:
            bench.restore()

    each()
