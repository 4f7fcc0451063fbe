"""A server in the background: asked, explained when it ends, and gone with the command that started it.

A stand-in answers here; the other files of this room run real ones.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capture_hooks.engines.server import GoneError, running
from capture_hooks.errors import EngineError

HERE = Path(__file__).parent
COMMAND = """
import sys
from capture_hooks.engines.server import running
with running("Engine", "stand_in", ["--note", sys.argv[1]], {}, lambda server: server.get("/about")):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def started(*words, cause=lambda log: None):
    return running("Engine", "stand_in", words, {}, lambda server: server.get("/about"), cause)


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
    with started("--note", str(note)) as server:
        assert server.info == {"path": "/about"}
        assert server.get("/empty") is None
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
        started() as server,
        pytest.raises(GoneError, match=r"(?s)^Engine ended with 4:\nline 29\n.*the end$"),
    ):
        server.get(path)


def test_one_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(EngineError, match=r"(?s)^Engine ended with 3:\n.*no room$"),
        started("--dies", "no room"),
    ):
        pass
    with (
        pytest.raises(EngineError, match=r"^Engine ended with 3: 'no room' is the end$"),
        started("--dies", "no room", cause=lambda log: f"{log.splitlines()[-1]!r} is the end"),
    ):
        pass
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -2), (signal.SIGKILL, -9)]
)
def test_it_ends_with_the_command_that_started_it(tmp_path, number, code):
    note = tmp_path / "note"
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(note)],
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
