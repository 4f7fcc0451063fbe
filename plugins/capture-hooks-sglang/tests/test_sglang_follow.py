"""The life of a server, by a stand-in that answers, reports and misbehaves as told.

Real ones are in tests/engines.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from capture_hooks_sglang.driver import SGLangDriver

from capture_hooks.engines import serve
from capture_hooks.engines.command import ServerCommand
from capture_hooks.engines.process import group_runs
from capture_hooks.errors import EngineError

STAND_IN = """
import http.server, json, os, signal, subprocess, sys, time
told = json.loads(sys.argv[1])
def end(number, frame):
    print("a line that is not ended", end="", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if told.get("deaf") else end)
# A scheduler, which outlives its parent.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(told["note"], "w").write(f"{os.getpgrp()} {os.environ['CAPTURE_HOOKS_HANDSHAKE']}")
for report in told["reports"]:
    name = f"replica-{report['replica']}-rank-{report['rank']}.json"
    open(os.path.join(os.environ["CAPTURE_HOOKS_HANDSHAKE"], name), "w").write(json.dumps(report))
if "dies" in told:
    time.sleep(0.5 if told["reports"] else 0)
    os.kill(os.getpid(), -told["dies"]) if told["dies"] < 0 else os._exit(told["dies"])
if told.get("silent"):
    time.sleep(600)

class Answers(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Answers.asked += 1
        status, body = 200, {}
        if self.path == "/health":
            status = 503 if Answers.asked == 1 else 200
        elif told.get("key") and self.headers["Authorization"] != f"Bearer {told['key']}":
            status = 401
        else:
            body = told["info"]
            open(told["note"] + ".ready", "w").close()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode() if self.path != "/health" else b"")
        if told.get("later") and self.path != "/health":
            self.wfile.flush()
            os._exit(told["later"])
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", told["port"]), Answers).serve_forever()
"""


def report(rank=0, replica=0, verdict="matches", message="", **changes):
    return {
        "rank": rank,
        "replica": replica,
        "source": "the head somewhere",
        "points": ["post.2", "post.5"],
        "boundaries": [3, 6],
        "mechanism": "native",
        "reason": "",
        "verdict": verdict,
        "message": message,
        **changes,
    }


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Watch a stand-in; afterwards nothing of it may be left: no process, no directory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    note = tmp_path / "note"
    monkeypatch.setattr(serve, "_ASK", 0.1)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves

    def start(reports=(), *, environment=None, timeout=60.0, send=None, api_key="", info=None, **told):
        told = {
            "port": port,
            "note": str(note),
            "reports": list(reports),
            "info": info or {"tp_size": 1},
            **told,
        }
        argv = (sys.executable, "-c", STAND_IN, json.dumps(told))
        command = ServerCommand(argv, "http", "127.0.0.1", "127.0.0.1", port, api_key)
        before = signal.getsignal(signal.SIGTERM)
        if send is not None:
            threading.Thread(target=_send, args=(note, send), daemon=True).start()
        try:
            return SGLangDriver().follow(command, {**os.environ, **(environment or {})}, timeout)
        finally:
            assert signal.getsignal(signal.SIGTERM) is before
            group, directory = note.read_text().split()
            assert not group_runs(int(group))
            assert not Path(directory).exists()
            assert Path(directory).parent == Path(tempfile.gettempdir())

    yield start
    signal.signal(signal.SIGHUP, hang_up)


def _send(note, signals):
    """Each signal, half a second apart, once the server has told its ranks and is about to be followed."""
    ready = Path(f"{note}.ready")
    while not ready.exists():
        time.sleep(0.05)
    for number in signals:
        time.sleep(0.5)
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_stops_it_and_is_told_in_the_exit_code(run, capfd, number, code):
    assert run([report()], send=[number]) == code
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == (
        "capture-hooks: rank 0 captures post.2, post.5 (boundaries 3, 6) by SGLang's own capture, "
        "as the head somewhere asks; witness matches"
    )
    assert lines[1].startswith("capture-hooks: serving at http://127.0.0.1:")
    assert lines[1].endswith("reported by its rank: witness matches")
    assert lines[-1] == f"capture-hooks: the server was stopped, by {number.name}"


def test_a_hang_up_that_is_ignored_already_stays_so(run):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run([report()], send=[signal.SIGHUP, signal.SIGTERM]) == 143


def test_one_that_does_not_listen_is_killed_at_the_second_signal(run):
    start = time.monotonic()
    assert run([report()], send=[signal.SIGINT, signal.SIGINT], deaf=True) == 130
    assert time.monotonic() - start < serve.GRACE


def test_one_that_does_not_listen_is_killed_after_a_while(run, monkeypatch):
    monkeypatch.setattr(serve, "GRACE", 1.0)
    assert run([report()], send=[signal.SIGTERM], deaf=True) == 143


def refused(run, *args, **told):
    with pytest.raises(EngineError) as caught:
        run(*args, **told)
    return str(caught.value)


def test_every_rank_of_every_replica_must_report(run):
    reports = [report(rank, replica) for replica in range(2) for rank in range(2)][:-1]
    said = refused(run, reports, info={"tp_size": 2, "dp_size": 2})
    assert "1 of its 4 scheduler ranks never reported what they capture (rank 1 of replica 1)" in said


def test_all_ranks_of_all_replicas(run, capfd):
    reports = [report(rank, replica) for replica in range(2) for rank in range(2)]
    assert run(reports, info={"tp_size": 2, "dp_size": 2}, send=[signal.SIGTERM]) == 143
    out = capfd.readouterr().out
    assert out.count(" captures post.2, post.5 ") == 4
    assert "reported by all 4 ranks: witness matches" in out


def test_no_rank_reports(run):
    said = refused(run)
    assert "1 of its 1 scheduler ranks never reported what they capture (rank 0)" in said


def test_ranks_that_differ(run):
    reports = [report(0), report(1, points=["post.1", "post.5"], boundaries=[2, 6])]
    assert "its ranks capture differently" in refused(run, reports, info={"tp_size": 2})


@pytest.mark.parametrize("verdict", ["mismatch", "undetermined"])
def test_a_verdict_that_strict_mode_refuses(run, verdict):
    first, second = report(0, 0, verdict, "slot 0 holds post.1"), report(1, 0, verdict, "other")
    said = refused(run, [first, second], info={"tp_size": 2})
    assert said.splitlines() == [
        "the server was stopped; it must not serve this head",
        "rank 0: it captures post.2, post.5, as the head somewhere asks. slot 0 holds post.1",
        "rank 1: it captures post.2, post.5, as the head somewhere asks. other",
    ]


def test_ranks_that_refuse_alike_are_named_together(run):
    reports = [report(rank, verdict="failed", message="too wide") for rank in range(2)]
    assert refused(run, reports).splitlines()[1:] == ["rank 0, rank 1: too wide"]


@pytest.mark.parametrize("verdict", ["mismatch", "undetermined", "drift"])
def test_what_warn_mode_serves(run, capfd, verdict):
    environment = {"CAPTURE_HOOKS_VERIFY": "warn"}
    assert run([report(verdict=verdict, message="why")], environment=environment, send=[signal.SIGINT]) == 130
    out = capfd.readouterr().out
    assert f"witness {verdict}: why" in out
    assert f"reported by its rank: witness {verdict}" in out


def test_a_failure_is_refused_in_warn_mode_too(run):
    environment = {"CAPTURE_HOOKS_VERIFY": "warn"}
    assert "too wide" in refused(run, [report(verdict="failed", message="too wide")], environment=environment)


def test_hooks_are_told_with_their_reason(run, capfd):
    hooks = report(mechanism="hooks", reason="it has no capture of its own", boundaries=[3, None])
    run([hooks], send=[signal.SIGINT])
    assert "(boundaries 3, -) by hooks (it has no capture of its own)" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("dies", "how"), [(3, "with exit code 3"), (0, "with exit code 0"), (-9, "by SIGKILL")]
)
def test_one_that_ends_while_starting(run, dies, how):
    assert f"ended by itself before it was ready, {how}" in refused(run, dies=dies)


def test_one_that_ends_with_a_report_is_explained_by_it(run):
    said = refused(run, [report(verdict="failed", message="too wide")], dies=1)
    assert said.endswith("rank 0: too wide")


def test_one_that_ends_later(run):
    assert "SGLang ended by itself, with exit code 7" in refused(run, [report()], later=7)


def test_one_that_is_never_ready(run):
    assert "not ready after 1 s (--start-timeout)" in refused(run, [report()], timeout=1.0, silent=True)


def test_a_server_with_a_key(run):
    assert run([report()], key="hush", api_key="hush", send=[signal.SIGTERM]) == 143
    said = refused(run, [report()], key="hush", api_key="other")
    assert "/server_info answers with status 401" in said
    assert "hush" not in said


def test_a_group_runs_until_its_last_process_has_ended():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    leader.wait()
    assert group_runs(leader.pid)
    os.killpg(leader.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while group_runs(leader.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
