"""An engine's server as a process group of its own: started, sent requests, and stopped as a whole."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self, TypeVar

from ..errors import EngineError
from .command import ServerCommand
from .reports import HANDSHAKE, RankReport, read_reports

#: Seconds between two looks at a server that starts or serves, and at one that was told to end.
TICK: Final = 0.2
_BRIEF: Final = 0.02
#: Seconds for an answer to a question that tells whether it is ready.
_ANSWER: Final = 10.0
#: Seconds that a server which only we ask is given to end by itself.
GRACE: Final = 5.0
#: Seconds for a group to vanish that has been killed.
_LAST: Final = 20.0
#: Last lines of its output that an error shows.
_LINES: Final = 12

_T = TypeVar("_T")


class GoneError(EngineError):
    """The server does not answer: it has not begun to, or it has ended."""


class EngineProcess:
    """A server that was started; `started` makes one.

    Attributes:
        command: what was run, and where it answers.
    """

    def __init__(
        self,
        engine: str,
        command: ServerCommand,
        environment: Mapping[str, str],
        folder: Path,
        *,
        quiet: bool,
        cause: Callable[[str], str | None],
    ) -> None:
        self.command = command
        self._engine, self._folder, self._cause = engine, folder, cause
        self._log = folder / "log" if quiet else None
        self._ready = self._stopped = False
        with self._log.open("wb") if self._log is not None else contextlib.nullcontext() as log:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env={**environment, HANDSHAKE: str(folder)},
                start_new_session=True,  # an interrupt at the terminal is ours to handle
            )

    @property
    def reports(self) -> list[RankReport]:
        """What its ranks have reported."""
        return read_reports(self._folder)

    @property
    def alive(self) -> bool:
        """Whether its first process is still running."""
        return self._process.poll() is None

    def answer(self, path: str) -> tuple[int, Any]:
        """An endpoint's status and answer, as JSON where it is some; status 0 where nothing answers."""
        try:
            status, body = self._request("GET", path, None, _ANSWER)
            return status, json.loads(body) if body.strip().startswith(b"{") else {}
        except (OSError, ValueError, http.client.HTTPException):
            return 0, {}

    def post(self, path: str, payload: Any) -> Any:
        """The answer of an endpoint to ``payload``, as JSON; None for an empty one.

        Raises:
            GoneError: the server is gone; with its reason.
            EngineError: it refused; with its reason.
        """
        try:
            status, body = self._request("POST", path, json.dumps(payload).encode(), None)
            if status < 400:
                return json.loads(body) if body else None
        except (OSError, ValueError, http.client.HTTPException) as error:
            if self._ends():
                raise GoneError(self.obituary()) from None
            raise GoneError(f"{self._engine} does not answer at {self.command.url}: {error}") from None
        if status >= 500 and self._ends():
            raise GoneError(self.obituary())
        raise EngineError(f"{self._engine} refused: {_reason(body)}")

    def until_ready(
        self,
        ready: Callable[[EngineProcess], _T | None],
        timeout: float,
        every: float = TICK,
        waits: Callable[[], bool] = lambda: True,
    ) -> _T | None:
        """Wait until ``ready`` gives something, which is returned.

        Args:
            ready: asked about the server; None means not yet.
            timeout: seconds.
            every: seconds between two questions.
            waits: whether to go on waiting; asked more often.  None is returned when not.

        Raises:
            GoneError: it ended instead.
            TimeoutError: it is not ready in time.
        """
        deadline, ask = time.monotonic() + timeout, 0.0
        while waits():
            if not self.alive:
                raise GoneError(self.obituary())
            if (now := time.monotonic()) >= ask:
                if (told := ready(self)) is not None:
                    self._ready = True
                    return told
                if now > deadline:
                    raise TimeoutError
                ask = time.monotonic() + every
            time.sleep(TICK)
        return None

    def obituary(self) -> str:
        """Why it is gone: what a rank reported last, else the end of its output, else how it ended."""
        failed = list(dict.fromkeys(report.message for report in self.reports if report.verdict == "failed"))
        if failed:
            return "; ".join(failed)
        code = self._process.poll()
        if self._log is None:
            when = "" if self._ready else " before it was ready"
            how = (
                f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
            )
            return f"{self._engine} ended by itself{when}, {how}; its own messages are above"
        log = self._log.read_text(errors="replace")
        if (cause := self._cause(log)) is not None:
            return f"{self._engine} ended with {code}: {cause}"
        return "\n".join([f"{self._engine} ended with {code}:", *log.strip().splitlines()[-_LINES:]])

    def stop(self, grace: float = GRACE, hurried: Callable[[], bool] = lambda: False) -> None:
        """End the whole group: asked first, killed after ``grace`` seconds or when ``hurried``."""
        if self._stopped:
            return
        self._stopped = True
        deadline = time.monotonic() + grace
        try:
            if self.alive:
                self._process.terminate()
            while self.alive and time.monotonic() < deadline and not hurried():
                time.sleep(_BRIEF)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            # Its other processes are not ours to wait for; until they are gone they may still print.
            deadline = time.monotonic() + _LAST
            while group_runs(self._process.pid):
                if time.monotonic() > deadline:
                    left = f"warning: processes of the server's group {self._process.pid} do not end"
                    print(left, file=sys.stderr, flush=True)
                    break
                time.sleep(_BRIEF)

    def _request(
        self, method: str, path: str, body: bytes | None, timeout: float | None
    ) -> tuple[int, bytes]:
        kind: Any = http.client.HTTPConnection
        more: dict[str, Any] = {}
        if self.command.scheme == "https":
            # Our own child, on this machine; its certificate names another host.
            kind, more = http.client.HTTPSConnection, {"context": ssl._create_unverified_context()}
        connection = kind(self.command.host, self.command.port, timeout=timeout, **more)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.command.api_key:
            headers["Authorization"] = f"Bearer {self.command.api_key}"
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _ends(self) -> bool:
        """Whether it is gone; one that was ready and fails is given a moment for its last words."""
        if self._ready:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        return not self.alive


@contextmanager
def started(
    engine: str,
    command: ServerCommand,
    environment: Mapping[str, str],
    *,
    quiet: bool,
    cause: Callable[[str], str | None] = lambda log: None,
) -> Iterator[EngineProcess]:
    """Start a server; leaving the context stops it, also when this process is asked to terminate.

    Args:
        engine: its name, for messages.
        command: what to run.
        environment: its whole environment; a directory for the ranks' reports is added.
        quiet: keep its output, for errors, instead of letting it print.
        cause: why it ended, from its output; None where that does not say.
    """
    with (
        _unwinding(),
        tempfile.TemporaryDirectory(prefix=f"capture-hooks-{engine.lower()}-") as folder,
    ):
        process = EngineProcess(engine, command, environment, Path(folder), quiet=quiet, cause=cause)
        try:
            yield process
        finally:
            process.stop()


@contextmanager
def _unwinding() -> Iterator[None]:
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


class Signals:
    """Notes the signals that ask to stop, instead of acting on them.

    Used as a context manager, in the main thread.  A hang-up that is ignored already (``nohup``) stays so.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))


def group_runs(group: int) -> bool:
    """Whether any process of a group is still running (one that only waits to be reaped is not)."""
    if not Path("/proc/self/stat").exists():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        return True
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent group ...; a name may hold anything, so count from its last bracket.
            state, _, its_group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def _reason(body: bytes) -> str:
    try:
        read = json.loads(body)
        message = read["error"]["message"] if isinstance(read.get("error"), dict) else read.get("error", read)
        return str(message)
    except (ValueError, KeyError, AttributeError):
        return body.decode(errors="replace")[:300]
