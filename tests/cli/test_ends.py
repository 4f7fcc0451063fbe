"""How a command ends when something goes wrong that no option names: imports, streams, disks, and bugs."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from capture_hooks.cli import main
from capture_hooks.testing import tiny

RUN = "from capture_hooks.cli import main; main()"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, and data beside it."""
    place = tmp_path_factory.mktemp("target") / "target"
    tiny.llama(num_hidden_layers=8, max_position_embeddings=64).save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    (place.parent / "data.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    return place


def run(
    *arguments: str | bytes, code: str = RUN, where: Path | None = None, most: int | None = None, **how
) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own; no file may grow beyond ``most`` bytes."""

    def limit() -> None:
        if most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    env = {**os.environ, "CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD": "", **how.pop("env", {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=where, env=env, timeout=120, preexec_fn=limit, **streams
    )


def failing(statement: str) -> str:
    """Code in which looking for a module does ``statement`` (``name`` is the module's)."""
    return (
        dedent(f"""
        import sys
        class Finder:
            def find_spec(self, name, path=None, target=None):
                {statement}
        sys.meta_path.insert(0, Finder())
    """)
        + RUN
    )


@pytest.mark.parametrize("module", ["typer", "capture_hooks.cli.app", "torch", "transformers"])
def test_an_interrupt_while_libraries_are_imported_is_quiet(module: str, target: Path) -> None:
    done = run("points", str(target), code=failing(f"if name == {module!r}: raise KeyboardInterrupt"))
    assert (done.returncode, done.stdout) == (130, b"")
    assert done.stderr in (b"", b"interrupted\n")  # typer says nothing of one within a command


@pytest.mark.parametrize(
    ("module", "says"),
    [
        ("typer", "the command line needs typer: pip install 'capture-hooks[cli]'"),
        ("transformers", "pip install"),
        ("accelerate", "training needs accelerate: pip install 'capture-hooks[train]'"),
        ("jinja2", "this command needs jinja2: pip install 'capture-hooks[train]'"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_to_install(
    module: str, says: str, target: Path, tmp_path: Path
) -> None:
    missing = f"raise ModuleNotFoundError(f'No module named {{name!r}}', name={module!r})"
    # find_spec is also how a library is looked for without importing it.
    looked = (
        "import importlib.util as u; f = u.find_spec\n"
        f"u.find_spec = lambda name, *rest: None if name == {module!r} else f(name, *rest)\n"
    )
    data = str(target.parent / "data.jsonl")
    words = ("train", "--model", str(target), "--data", data, "--out", str(tmp_path / "head"), "--steps", "1")
    done = run(*words, code=looked + failing(f"if name.split('.')[0] == {module!r}: {missing}"))
    message = done.stderr.decode().strip()
    assert done.returncode == 1
    assert message.startswith("error: ")
    assert "\n" not in message
    assert module in message
    assert says in message
    assert not any(tmp_path.iterdir())


@pytest.fixture
def buggy(tmp_path: Path) -> dict[str, str]:
    """The environment of a plugin whose command has a bug."""
    info = tmp_path / "acme-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[capture_hooks]\nacme = acme_plugin\n")
    (tmp_path / "acme_plugin.py").write_text(
        dedent("""
        from capture_hooks import hookimpl
        from capture_hooks.cli.contract import Command

        def bug() -> None:
            {}["x"]

        def room() -> None:
            raise MemoryError

        def disk() -> None:
            open("there/is/none")

        @hookimpl
        def capture_hooks_commands():
            return [Command(function.__name__, function, "Fails.") for function in (bug, room, disk)]
        """)
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "CAPTURE_HOOKS_PLUGINS": "acme"}


def test_what_nobody_foresaw_says_that_it_is_a_bug_and_where(buggy: dict[str, str], tmp_path: Path) -> None:
    done = run("bug", env=buggy)
    message = done.stderr.decode()
    assert (done.returncode, done.stdout) == (1, b"")
    assert message.startswith(
        f"error: unexpected KeyError: 'x' ({tmp_path / 'acme_plugin.py'}:6). This is a bug"
    )
    assert message.count("\n") == 1
    assert "CAPTURE_HOOKS_TRACEBACK=1" in message

    shown = run("bug", env={**buggy, "CAPTURE_HOOKS_TRACEBACK": "1"}).stderr.decode()
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith(message)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("room", "error: out of memory\n"),
        ("disk", "error: cannot use there/is/none: No such file or directory\n"),
    ],
)
def test_what_can_go_wrong_anywhere_is_no_bug(command: str, message: str, buggy: dict[str, str]) -> None:
    done = run(command, env=buggy)
    assert (done.returncode, done.stderr.decode()) == (1, message)


def test_a_standard_output_that_is_full_is_one_line(target: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = run("points", str(target), stdout=full)
    assert done.returncode == 1
    message = done.stderr.decode()
    assert message.startswith("error: ")
    assert message.endswith("the standard output, cannot be written: No space left on device\n")
    assert message.count("\n") == 1


def test_names_that_the_terminal_cannot_show_are_escaped(target: Path, tmp_path: Path) -> None:
    words = ("dump", "--model", str(target), "--data", str(target.parent / "data.jsonl"), "--spec", "post.0")
    name = b"caf\xe9 \xc3\xa9[/red]"
    done = run(*words, "--out", name, where=tmp_path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert rb"saved caf\udce9 \xe9[/red]:" in done.stdout
    assert os.path.isdir(os.path.join(os.fsencode(tmp_path), name))


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("dump", "--spec", "post.0, post.1, post.2"), 100),
        (("train", "--steps", "1", "--held-out", "0", "--ttt-steps", "1"), 5_000),
    ],
    ids=["dump", "train"],
)
def test_a_disk_that_takes_no_more_is_one_line(
    words: tuple[str, ...], most: int, target: Path, tmp_path: Path
) -> None:
    command, *rest = words
    data = str(target.parent / "data.jsonl")
    done = run(
        command, "--model", str(target), "--data", data, "--out", str(tmp_path / "made"), *rest, most=most
    )
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1, done.stdout
    assert last.startswith("error: ")
    assert "unexpected" not in last
    assert "too large" in last or "larger than" in last
    assert not any(tmp_path.rglob("*.safetensors"))
    assert command == "dump" or not any(tmp_path.iterdir())


def test_a_null_byte_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["points", "a\0b"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: an argument holds a null byte\n"
