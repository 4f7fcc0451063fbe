"""The command line as a process: exit codes, one-line errors, plugin commands, and how little it imports."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import capture_hooks
from capture_hooks.cli.app import build

RUN = "from capture_hooks.cli import main; main()"
ALONE = {"CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run(
    *arguments: str, path: Path | None = None, code: str = RUN, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command as its console script does."""
    env = {**os.environ, "TERM": "dumb", "COLUMNS": "200", "NO_COLOR": "1", **environ}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, timeout=120
    )


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A distribution of one plugin with three commands, one of which typer cannot read."""
    info = tmp_path / "acme-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[capture_hooks]\nacme = acme_plugin\n")
    (tmp_path / "acme_plugin.py").write_text(
        dedent("""
        from capture_hooks import CaptureHooksError, hookimpl
        from capture_hooks.cli.contract import Command

        def greet(name: str, loud: bool = False) -> None:
            print(name.upper() if loud else name)

        def fail() -> None:
            raise CaptureHooksError("the file 'x' has no rows; write some")

        def odd(value: int | str) -> None: ...

        def flood() -> None:
            for _ in range(100_000):
                print("a line that nobody reads to the end")

        def wait() -> None:
            import time
            print("ready", flush=True)
            time.sleep(60)

        @hookimpl
        def capture_hooks_commands():
            functions = {"greet": greet, "fail": fail, "odd": odd, "flood": flood, "wait": wait}
            return [Command(name, function, f"{name} somebody") for name, function in functions.items()]
        """)
    )
    return tmp_path


def only(plugin: Path) -> dict[str, str]:
    return {"path": plugin, "CAPTURE_HOOKS_PLUGINS": "acme"}  # type: ignore[dict-item]  # keyword arguments of run


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"capture-hooks {capture_hooks.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "--help"], ["--version"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    """With every installed plugin loaded: help that takes seconds is not read."""
    code = dedent("""
        import sys
        from capture_hooks.cli import main
        try:
            main()
        finally:
            heavy = {"torch", "transformers", "datasets", "accelerate"} & set(sys.modules)
            print("heavy:", *sorted(heavy), file=sys.stderr)
    """)
    result = run(*arguments, code=code)
    assert (result.returncode, result.stderr) == (0, "heavy:\n")


def test_every_command_of_the_core_has_help() -> None:
    app = build(["plugins"])
    commands = [info.name for info in app.registered_commands]
    core = ["points", "explain", "convert", "plugins", "dump", "train", "generate", "eval", "serve"]
    assert commands == core
    groups = [info.name for info in app.registered_groups]
    assert groups == ["data"]
    for command in (*commands, *groups):
        result = run(command, "--help", **ALONE)
        assert result.returncode == 0, result.stderr
        assert f"Usage: capture-hooks {command}" in result.stdout


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["plugins", "--nonsense"], ["plugins", "extra"], ["--nonsense"]]
)
def test_usage_errors_exit_2(arguments: list[str]) -> None:
    result = run(*arguments, **ALONE)
    assert result.returncode == 2
    assert "Usage: capture-hooks" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_group_of_the_core_loads_no_plugin(plugin: Path) -> None:
    (plugin / "acme_plugin.py").write_text("import sys; print('loaded', file=sys.stderr)")
    assert "loaded" in run("greet", **only(plugin)).stderr
    result = run("data", "--help", **only(plugin))
    assert (result.returncode, result.stderr) == (0, "")


def test_a_users_error_is_its_message_and_exit_1(plugin: Path) -> None:
    result = run("fail", **only(plugin))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "error: the file 'x' has no rows; write some"
    assert "Traceback" not in result.stderr


def test_an_engine_that_is_not_there_is_told_those_that_are(tmp_path: Path) -> None:
    words = ("--model", str(tmp_path), "--head", str(tmp_path), "--data", "chats.jsonl", "--engine", "acme")
    done = run("eval", *words, **ALONE)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert lines == [
        "error: nothing named 'acme' among the installed engines: there are none",
        "'embedded' needs no plugin",
    ]


def test_a_plugins_command_runs_and_is_listed(plugin: Path) -> None:
    assert run("greet", "you", "--loud", **only(plugin)).stdout == "YOU\n"
    listed = run("--help", **only(plugin))
    assert listed.returncode == 0
    assert "greet somebody" in listed.stdout


def test_a_plugins_command_that_cannot_be_parsed_is_left_out_alone(plugin: Path) -> None:
    listed = run("--help", **only(plugin))
    assert "odd somebody" not in listed.stdout
    assert "warning: command 'odd' is left out: AssertionError" in listed.stderr
    shown = run("plugins", **only(plugin))
    assert shown.returncode == 1
    assert "BROKEN  command 'odd': AssertionError" in shown.stdout


def test_a_plugin_may_not_take_a_command_of_the_core(plugin: Path) -> None:
    source = (plugin / "acme_plugin.py").read_text()
    (plugin / "acme_plugin.py").write_text(source.replace('"greet": greet', '"plugins": greet'))
    result = run("--help", **only(plugin))
    assert result.returncode == 1
    assert "\nerror: acme adds a command 'plugins', which is the core's own" in result.stderr
    assert run("plugins", "--help", **only(plugin)).returncode == 0  # the core's own still work


def test_plugins_lists_what_each_adds(plugin: Path) -> None:
    result = run("plugins", **only(plugin))
    assert "acme  (acme 2.0)\n    commands: fail, flood, greet, odd, wait\n" in result.stdout
    assert "core  (capture-hooks " in result.stdout


def test_plugins_alone_exits_0() -> None:
    result = run("plugins", **ALONE)
    assert (result.returncode, result.stderr) == (0, "")


def test_plugins_exits_1_and_says_why_when_one_is_broken(plugin: Path) -> None:
    (plugin / "acme_plugin.py").write_text("import there_is_no_such_module")
    result = run("plugins", **only(plugin))
    assert result.returncode == 1
    assert (
        "BROKEN  acme (acme 2.0): ModuleNotFoundError: No module named 'there_is_no_such_module'"
        in result.stdout
    )

    report = json.loads(run("plugins", "--json", **only(plugin)).stdout)
    (broken,) = report["broken"]
    assert (broken["name"], broken["distribution"], broken["version"]) == ("acme", "acme", "2.0")
    assert "Traceback (most recent call last)" in broken["traceback"]
    assert [p["name"] for p in report["plugins"]] == ["core"]

    strict = run("plugins", CAPTURE_HOOKS_STRICT_PLUGINS="1", **only(plugin))
    assert strict.returncode == 1
    assert strict.stderr.startswith(
        "error: broken plugin (CAPTURE_HOOKS_STRICT_PLUGINS is set): acme (acme 2.0)"
    )

    unknown = run("greet", "you", **only(plugin))
    assert unknown.returncode == 2
    assert "broken plugins are left out; see 'capture-hooks plugins'" in unknown.stderr


def test_a_reader_that_goes_away_ends_it_quietly(plugin: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(plugin), "CAPTURE_HOOKS_PLUGINS": "acme"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "flood"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_an_interrupt_exits_130_without_a_traceback(plugin: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(plugin), "CAPTURE_HOOKS_PLUGINS": "acme"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        # A background job's children inherit an ignored SIGINT, which Python then leaves ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "Traceback" not in process.stderr.read()


def test_without_typer_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None\n" + RUN
    result = run("--help", code=code)
    assert result.returncode == 1
    assert result.stderr == "error: the command line needs typer: pip install 'capture-hooks[cli]'\n"
