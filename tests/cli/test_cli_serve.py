"""``capture-hooks serve``: what it hands to an engine, and what it refuses without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

RUN = "from capture_hooks.cli import main; main()"
HEAD = Path(__file__).parents[2] / "examples" / "smollm2" / "head"


@pytest.fixture
def run(tmp_path: Path):
    """The command, with one installed plugin: an engine that prints what it is given and ends with 143."""
    info = tmp_path / "acme-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[capture_hooks]\nacme = acme_plugin\n")
    (tmp_path / "acme_plugin.py").write_text(
        dedent("""
        import json
        from capture_hooks import hookimpl
        from capture_hooks.errors import EngineError

        class Echo:
            name = "echo"

            def capture(self, model, spec, settings): ...
            def decode(self, model, head, settings): ...

            def serve(self, head, model, settings, start_timeout):
                if "--bad" in settings:
                    raise EngineError("the server was stopped; why")
                print(json.dumps([str(head), str(model), settings, start_timeout]))
                return 143

        @hookimpl
        def capture_hooks_engines():
            return [Echo()]
        """)
    )

    def start(*words: object) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "TERM": "dumb",
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "PYTHONPATH": str(tmp_path),
        }
        environment["CAPTURE_HOOKS_PLUGINS"] = "acme"
        command = [sys.executable, "-c", RUN, "serve", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)

    return start


def test_words_after_the_dashes_are_the_engines(run) -> None:
    flags = ["--tp", "2", "--model-path", "m", "-x", "--", "end"]
    done = run("some/head", "--engine", "echo", "--model", "owner/name", "--start-timeout", "5", "--", *flags)
    assert done.returncode == 143
    assert json.loads(done.stdout) == ["some/head", "owner/name", flags, 5.0]


def test_nothing_after_the_dashes(run) -> None:
    done = run("--engine", "echo", "--model", "m", "some/head")
    assert json.loads(done.stdout) == ["some/head", "m", [], 1800.0]


def test_a_flag_before_the_dashes_is_a_usage_error(run) -> None:
    done = run("some/head", "--engine", "echo", "--model", "m", "--tp", "2")
    assert done.returncode == 2
    assert "No such option: --tp" in done.stderr


def test_what_the_engine_refuses_is_the_last_line(run) -> None:
    done = run("some/head", "--engine", "echo", "--model", "m", "--", "--bad")
    assert (done.returncode, done.stderr) == (1, "error: the server was stopped; why\n")


def test_an_engine_that_is_not_there(run) -> None:
    done = run("some/head", "--engine", "ecko", "--model", "m")
    assert done.returncode == 1
    assert done.stderr.startswith("error: nothing named 'ecko' among the installed engines (echo)")
    assert "did you mean 'echo'?" in done.stderr


def test_the_target_must_be_named(run, tmp_path: Path) -> None:
    done = run(HEAD, "--engine", "echo")
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    assert "records which target it was trained on (LlamaForCausalLM, 30 layers, 576 wide), not where" in said
    done = run(tmp_path / "nowhere", "--engine", "echo")
    assert done.returncode == 1
    assert "is not a directory; a head is a directory with config.json" in done.stderr
