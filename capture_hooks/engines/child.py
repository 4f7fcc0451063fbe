"""A server as a process group of its own: nothing of it is left when it has been stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

#: Seconds between two looks at anything.
TICK: Final = 0.2
#: Seconds for a group to vanish that has been killed.
_LAST: Final = 20.0


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


class Child:
    """A started command, in a session of its own: Ctrl-C reaches us, and we stop it.

    Args:
        argv: the command.
        environment: its whole environment.
    """

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            argv, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def ended(self) -> str | None:
        """How the command's first process ended, as a clause; None while it runs."""
        code = self._process.poll()
        if code is None or code >= 0:
            return None if code is None else f"with exit code {code}"
        return f"by {signal.Signals(-code).name}"

    def stop(self, grace: float, signals: Signals) -> None:
        """End the whole group: asked first, killed after ``grace`` seconds or at another signal."""
        asked, deadline = len(signals.received), time.monotonic() + grace
        if self._process.poll() is None:
            self._process.terminate()
        while self._process.poll() is None and time.monotonic() < deadline:
            if len(signals.received) > asked:
                break
            time.sleep(TICK)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Its other processes are not ours to wait for; until they are gone they may still print.
        deadline = time.monotonic() + _LAST
        while group_runs(self._process.pid):
            if time.monotonic() > deadline:
                left = f"warning: processes of the server's group {self._process.pid} do not end"
                print(left, file=sys.stderr, flush=True)
                return
            time.sleep(TICK)


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
