"""An engine's server in the background, for as long as a command runs: asked over HTTP on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ..errors import EngineError
from .bound import bound_command
from .checks import free_port
from .child import group_runs
from .reports import HANDSHAKE, Report, read_reports

#: Seconds between two looks at a server that is starting.
_LOOK: Final = 0.2
#: Seconds until it must answer: a large model takes minutes to load.
_START: Final = 3600.0
#: Seconds it is given to end by itself.
_GRACE: Final = 5.0
#: Seconds between two looks at one that was killed.
_BRIEF: Final = 0.01
#: Last lines of its output that an error shows.
_LINES: Final = 12


class GoneError(EngineError):
    """Nothing answers: it has not begun to, or it is gone."""


class Server:
    """A running server; `running` makes one.

    Attributes:
        info: what it said of itself when it was ready; empty before.
    """

    def __init__(
        self,
        engine: str,
        process: subprocess.Popen[bytes],
        url: str,
        folder: Path,
        cause: Callable[[str], str | None],
    ) -> None:
        self._engine, self._process, self._url, self._folder = engine, process, url, folder
        self._cause = cause
        self.info: dict[str, Any] = {}

    @property
    def reports(self) -> list[Report]:
        """What its ranks have reported."""
        return read_reports(self._folder / "reports")

    @property
    def alive(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    def get(self, path: str) -> Any:
        """The answer of an endpoint, as JSON; None for an empty one.

        Raises:
            EngineError: the server refused it, or is gone; with its reason.
        """
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
        log = (self._folder / "log").read_text(errors="replace")
        if (cause := self._cause(log)) is not None:
            return f"{self._engine} ended with {self._process.poll()}: {cause}"
        lines = log.strip().splitlines()
        return "\n".join([f"{self._engine} ended with {self._process.poll()}:", *lines[-_LINES:]])

    def wait_until_ready(self, ask: Callable[[Server], dict[str, Any]]) -> None:
        """Until ``ask`` no longer raises `GoneError`; its answer becomes ``info``.

        Raises:
            EngineError: the server ended instead.
        """
        deadline = time.monotonic() + _START
        while True:
            try:
                self.info = ask(self)
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
            # Its other processes are not ours to wait for.
            deadline = time.monotonic() + _GRACE
            while group_runs(self._process.pid) and time.monotonic() < deadline:
                time.sleep(_BRIEF)

    def _ask(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request) as response:
                body = response.read()
                return json.loads(body) if body else None
        except urllib.error.HTTPError as error:
            reason = _reason(error.read())
            if error.code >= 500 and self._ends():
                raise GoneError(self.obituary()) from None
            raise EngineError(f"{self._engine} refused: {reason}") from None
        except (OSError, ValueError) as error:
            if self._ends():
                raise GoneError(self.obituary()) from None
            raise GoneError(f"{self._engine} does not answer at {self._url}: {error}") from None

    def _ends(self) -> bool:
        """Whether it is gone; one that was ready and fails is given a moment for its last words."""
        if self.info:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        return not self.alive


@contextmanager
def running(
    engine: str,
    module: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    ready: Callable[[Server], dict[str, Any]],
    cause: Callable[[str], str | None] = lambda log: None,
) -> Iterator[Server]:
    """Start a server on a free port of this machine; leaving the context stops it.

    Args:
        engine: its name, for messages.
        module: run as ``python -m``; takes ``--host`` and ``--port``.
        words: of its command line, but for these.
        environment: to set for it, beside this process's own.
        ready: asks it what it says of itself.
        cause: why it ended, from its output; None where that does not say.

    Raises:
        EngineError: it does not start; with the reason that a rank reported, else the end of its output.
    """
    with _ending_well(), tempfile.TemporaryDirectory(prefix=f"capture-hooks-{engine.lower()}-") as name:
        folder = Path(name)
        (folder / "reports").mkdir()
        port = free_port()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                bound_command(module, [*words, "--host", "127.0.0.1", "--port", str(port)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, HANDSHAKE: str(folder / "reports"), **environment},
                start_new_session=True,  # an interrupt at the terminal is this process's to handle
            )
        server = Server(engine, process, f"http://127.0.0.1:{port}", folder, cause)
        try:
            server.wait_until_ready(ready)
            yield server
        finally:
            server.stop()


@contextmanager
def _ending_well() -> Iterator[None]:
    """Let a request to terminate unwind, so that the server and its files are gone too."""
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _reason(body: bytes) -> str:
    try:
        read = json.loads(body)
        message = read["error"]["message"] if isinstance(read.get("error"), dict) else read.get("error", read)
        return str(message)
    except (ValueError, KeyError, AttributeError):
        return body.decode(errors="replace")[:300]
