"""A server in the background: asked, explained when it ends, and gone with the command that started it.

A stand-in answers here; the other files of this room run real ones.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from capture_hooks.engines.bound import bound_command
from capture_hooks.engines.checks import free_port
from capture_hooks.engines.command import ServerCommand
from capture_hooks.engines.process import GoneError, started
from capture_hooks.errors import EngineError

HERE = Path(__file__).parent
COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from test_process import running
with running("--note", sys.argv[2]):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)


def about(server):
    status, told = server.answer("/about")
    return told if status == 200 else None


@contextmanager
def running(*words, cause=lambda log: None):
    port = free_port()
    argv = tuple(bound_command("stand_in", [*words, "--host", "127.0.0.1", "--port", str(port)]))
    command = ServerCommand(argv, "http", "127.0.0.1", "127.0.0.1", port, "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    with started("Engine", command, environment, quiet=True, cause=cause) as server:
        assert server.until_ready(about, 60) == {"path": "/about"}
        yield server


def left(tmp_path):
    return [path.name for path in (tmp_path / "temporary").iterdir()]


def alive(pid):
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_it_answers_refuses_and_leaves_nothing(tmp_path):
    note = tmp_path / "note"
    with running("--note", str(note)) as server:
        assert server.post("/empty", {}) is None
        assert server.post("/", {"good": True}) == {"good": True}
        with pytest.raises(EngineError, match=r"^Engine refused: too long$"):
            server.post("/", {"good": False})
        assert server.reports == []
        assert server.alive
        assert len(left(tmp_path)) == 1
    assert not any(alive(int(pid)) for pid in note.read_text().split())
    assert left(tmp_path) == []


@pytest.mark.parametrize("path", ["/end", "/fail"])
def test_one_that_ends_says_its_last_words(path):
    with (
        running() as server,
        pytest.raises(GoneError, match=r"(?s)^Engine ended with 4:\nline 29\n.*the end$"),
    ):
        server.post(path, {})


def test_one_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(EngineError, match=r"(?s)^Engine ended with 3:\n.*no room$"),
        running("--dies", "no room"),
    ):
        pass
    with (
        pytest.raises(EngineError, match=r"^Engine ended with 3: 'no room' is the end$"),
        running("--dies", "no room", cause=lambda log: f"{log.splitlines()[-1]!r} is the end"),
    ):
        pass
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2), (signal.SIGKILL, -9)]
)
def test_it_ends_with_the_command_that_started_it(tmp_path, number, code):
    note = tmp_path / "note"
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(HERE), str(note)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # The tests themselves may run where interrupts are ignored, as a shell's background jobs do.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert command.stdout.readline() == "ready\n"
    server, worker = map(int, note.read_text().split())
    command.send_signal(number)
    assert command.wait(30) == code
    command.communicate()
    deadline = time.monotonic() + 30
    while alive(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if number == signal.SIGKILL:  # only the server itself is bound; its own processes end as it has them end
        os.kill(worker, signal.SIGKILL)
        return
    assert not alive(worker)
    assert left(tmp_path) == []
