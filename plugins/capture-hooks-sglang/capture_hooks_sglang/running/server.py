"""One server of SGLang's for as long as a command runs."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from capture_hooks.errors import EngineError

from ..launch import checks
from ..launch.flags import Flags, spelling
from ..launch.installed import check_installed
from ..serving.asked import HANDSHAKE
from ..serving.handshake import Report, read_reports

#: Seconds between two looks at a server that is starting.
_LOOK: Final = 0.2
#: Seconds until it must answer: a large model takes minutes to load.
_START: Final = 3600.0
#: Seconds it is given to end by itself.
_GRACE: Final = 5.0
#: Last lines of its output that an error shows.
_LINES: Final = 12


#: Flags for a server that others ask.
_ELSEWHERE: Final = ("certificate", "api key", "admin api key", "nodes", "grpc", "encoder", "host", "port")


class GoneError(EngineError):
    """Nothing answers: it has not begun to, or it is gone."""


class Server:
    """A running server; `running` makes one."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, folder: Path) -> None:
        self._process, self._url, self._folder = process, url, folder
        self.info: dict[str, Any] = {}

    @property
    def reports(self) -> list[Report]:
        """What its ranks have reported."""
        return read_reports(self._folder / "reports")

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting of SGLang's as it was resolved."""
        return self.info.get(name, default)

    def get(self, path: str) -> Any:
        """The answer of an endpoint."""
        return self._ask(urllib.request.Request(self._url + path))

    def post(self, path: str, payload: Any) -> Any:
        """The answer of an endpoint to ``payload``.

        Raises:
            EngineError: the server refused it, or is gone; with its reason.
        """
        body = json.dumps(payload).encode()
        return self._ask(urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}))

    def obituary(self) -> str:
        """Why it is gone: what a rank reported last, else the end of its output."""
        failed = list(dict.fromkeys(report.message for report in self.reports if report.verdict == "failed"))
        if failed:
            return "; ".join(failed)
        lines = (self._folder / "log").read_text(errors="replace").strip().splitlines()
        return "\n".join([f"SGLang ended with {self._process.poll()}:", *lines[-_LINES:]])

    def wait_until_ready(self) -> None:
        """Until it answers.

        Raises:
            EngineError: it ended instead.
        """
        deadline = time.monotonic() + _START
        while True:
            try:
                self.info = self.get("/server_info")
                return
            except GoneError:
                if not self.alive or time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK)

    def stop(self) -> None:
        """End it and all of its processes."""
        try:
            if self.alive:
                self._process.terminate()
                self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise EngineError(f"SGLang refused: {_reason(error.read())}") from None
        except (OSError, ValueError) as error:
            if self.info:  # it was ready: it is ending, and its last words are worth a moment
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE)
            if not self.alive:
                raise GoneError(self.obituary()) from None
            raise GoneError(f"SGLang does not answer at {self._url}: {error}") from None


@contextmanager
def running(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
    """Start a server on a free port of this machine; leaving the context stops it.

    Args:
        words: of SGLang's command line; where it listens is added.
        environment: to set for it, beside this process's own.

    Raises:
        EngineError: it does not start; with the reason that a rank reported, else the end of its output.
    """
    flags = Flags.read(words)
    if refused := [spelling(flag) for flag in _ELSEWHERE if flag in flags]:
        raise EngineError(
            f"{', '.join(refused)}: this server is asked by plain HTTP on this machine alone; leave it out"
        )
    with tempfile.TemporaryDirectory(prefix="capture-hooks-sglang-") as name:
        folder = Path(name)
        (folder / "reports").mkdir()
        port = _free_port()
        command = [sys.executable, "-m", "capture_hooks_sglang.running.bound_server", str(os.getpid())]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *words, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, HANDSHAKE: str(folder / "reports"), **environment},
                start_new_session=True,  # an interrupt at the terminal is this process's to handle
            )
        server = Server(process, f"http://127.0.0.1:{port}", folder)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def check_environment() -> None:
    """What can be seen before a server is started: SGLang is there, and will load the plugin.

    Raises:
        EngineError: it is not, or will not.
    """
    checks.check_plugin_loads(os.environ)
    warning = check_installed()
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def check_reports(server: Server) -> None:
    """Every rank has the plugin loaded and is content: silence is not success.

    Raises:
        EngineError: naming the ranks that did not report.
    """
    replicas, ranks = int(server.setting("dp_size", 1)), int(server.setting("tp_size", 1))
    wanted = {(replica, rank) for replica in range(replicas) for rank in range(ranks)}
    silent = sorted(wanted - {(report.replica, report.rank) for report in server.reports})
    if silent:
        named = ", ".join(f"replica {replica} rank {rank}" for replica, rank in silent)
        raise EngineError(
            f"SGLang runs without the plugin in {named}: its log says why it was not loaded "
            "(SGLANG_PLUGINS names the plugins that are)"
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _reason(body: bytes) -> str:
    try:
        read = json.loads(body)
        message = read["error"]["message"] if isinstance(read.get("error"), dict) else read.get("error", read)
        return str(message)
    except (ValueError, KeyError, AttributeError):
        return body.decode(errors="replace")[:300]
