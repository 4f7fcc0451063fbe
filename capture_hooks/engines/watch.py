"""A server's life: started, held to a handshake from every rank, stopped with the reason last."""

from __future__ import annotations

import http.client
import json
import ssl
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import EngineError
from .child import TICK, Child, Signals
from .command import Command
from .reports import HANDSHAKE, VERIFY, Report, read_reports

#: Seconds a server gets to finish its requests and stop.
GRACE: Final = 30.0
#: Seconds between two questions whether it is ready, and for an answer.
_ASK: Final = 1.0
_ANSWER: Final = 10.0


#: Asks a path of the server: status and answer, as JSON where it is some; status 0 where there was none.
Get = Callable[[str], tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Watched:
    """Whose server is watched.

    Attributes:
        name: the engine's.
        ranks: what its processes that must report are called.
        silence: what may explain a rank that does not, a clause.
        expected: told the server's answers and the reports so far: which ranks (replica, rank) it runs, or
            None while it is not ready.  Raises EngineError where that cannot be known.
    """

    name: str
    ranks: str
    silence: str
    expected: Callable[[Get, Sequence[Report]], set[tuple[int, int]] | None]


def watch(engine: Watched, command: Command, environment: Mapping[str, str], start_timeout: float) -> int:
    """Run a server until it is asked to stop.

    Args:
        engine: whose it is.
        command: what to run.
        environment: for it; a directory for the handshake is added.
        start_timeout: seconds until it must be ready.

    Returns:
        128 and the signal's number, by which it was asked to stop.

    Raises:
        EngineError: a rank refused, or did not report; the server ended by itself, or was not ready in time.
            All its processes are gone by then.
    """
    with tempfile.TemporaryDirectory(prefix="capture-hooks-") as directory, Signals() as signals:
        life = _Life(engine, command, Path(directory), environment.get(VERIFY) != "warn", signals)
        child = Child(command.argv, {**environment, HANDSHAKE: directory})
        failure: EngineError | None = None
        try:
            life.start(child, start_timeout)
            life.follow(child)
        except EngineError as error:
            failure = error
        finally:
            child.stop(GRACE, signals)
        print(flush=True)  # what it printed last need not have ended its line
        if failure is not None:
            # A rank may have written why while everything was ending.
            raise EngineError(life.refusal() or str(failure))
        _say(f"the server was stopped, by {signals.received[0].name}")
        return 128 + signals.received[0]


class _Life:
    """What is seen of a server from outside: its process, its answers, its ranks' reports."""

    def __init__(
        self, engine: Watched, command: Command, directory: Path, strict: bool, signals: Signals
    ) -> None:
        self._engine, self._command = engine, command
        self._directory, self._strict, self._signals = directory, strict, signals
        self._told: set[tuple[int, int]] = set()

    def start(self, child: Child, timeout: float) -> None:
        """Return when it is ready and every rank has reported, or when a signal asks to stop.

        Raises:
            EngineError: it never will be, or must not.
        """
        deadline, ask = time.monotonic() + timeout, 0.0
        while self._runs(child, " before it was ready"):
            self._tell()
            if refusal := self.refusal():
                raise EngineError(refusal)
            if (now := time.monotonic()) < ask:
                continue
            if self._ready():
                return
            if now > deadline:
                raise EngineError(f"the server was stopped: not ready after {timeout:g} s (--start-timeout)")
            ask = time.monotonic() + _ASK

    def follow(self, child: Child) -> None:
        """Return when a signal asks to stop.

        Raises:
            EngineError: it ended by itself.
        """
        while self._runs(child, ""):
            pass

    def _runs(self, child: Child, when: str) -> bool:
        if self._signals.received:
            return False
        time.sleep(TICK)
        if (ended := child.ended) is not None:
            raise EngineError(
                f"{self._engine.name} ended by itself{when}, {ended}; its own messages are above"
            )
        return not self._signals.received

    def refusal(self) -> str | None:
        """Why a rank that reported must not be served."""
        bad = {"failed"} | ({"mismatch", "undetermined"} if self._strict else set())
        reasons: dict[str, list[Report]] = {}
        for report in read_reports(self._directory):
            if report.verdict in bad:
                reasons.setdefault(_reason(report), []).append(report)
        if not reasons:
            return None
        lines = [f"{_names(reports)}: {reason}" for reason, reports in reasons.items()]
        return "\n".join(["the server was stopped; it must not serve this head", *lines])

    def _tell(self) -> None:
        for report in read_reports(self._directory):
            if (place := (report.replica, report.rank)) not in self._told:
                self._told.add(place)
                _say(describe(report, self._engine.name))

    def _ready(self) -> bool:
        """Whether it serves, with a report from every rank that it runs.

        Raises:
            EngineError: it serves, and a rank did not report, or reported another capture than the others.
        """
        expected = self._engine.expected(self._get, read_reports(self._directory))
        if expected is None:
            return False
        self._tell()
        if missing := sorted(expected - self._told):
            silent = ", ".join(_place(*place) for place in missing)
            raise EngineError(
                f"the server was stopped: {len(missing)} of its {len(expected)} {self._engine.ranks} never "
                f"reported what they capture ({silent}), so the plugin took no effect there and the head may "
                f"be fed anything; {self._engine.silence}"
            )
        reports = read_reports(self._directory)
        captures = {f"{', '.join(r.points)} at boundaries {r.boundaries}" for r in reports}
        if len(captures) > 1:
            raise EngineError(f"the server was stopped: its ranks capture differently: {sorted(captures)}")
        verdicts = ", ".join(sorted({report.verdict for report in reports}))
        count = f"all {len(expected)} ranks" if len(expected) > 1 else "its rank"
        _say(f"serving at {self._command.url}; reported by {count}: witness {verdicts}")
        return True

    def _get(self, path: str) -> tuple[int, Any]:
        """Status and answer, as JSON where it is some; status 0 where there was none."""
        kind: Any = http.client.HTTPConnection
        more: dict[str, Any] = {}
        if self._command.scheme == "https":
            # Our own child, on this machine; its certificate names another host.
            kind, more = http.client.HTTPSConnection, {"context": ssl._create_unverified_context()}
        connection = kind(self._command.host, self._command.port, timeout=_ANSWER, **more)
        try:
            key = self._command.api_key
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if body.strip().startswith(b"{") else {}
        except (OSError, ValueError, http.client.HTTPException):
            return 0, {}
        finally:
            connection.close()


def describe(report: Report, engine: str) -> str:
    """One rank's report in a line or two."""
    if report.verdict == "failed":
        return f"{_place(report.replica, report.rank)} refused: {report.message}"
    by = f"{engine}'s own capture" if report.mechanism == "native" else f"hooks ({report.reason})"
    boundaries = ", ".join("-" if boundary is None else str(boundary) for boundary in report.boundaries)
    shown = "" if report.verdict == "matches" else f": {report.message}"
    return (
        f"{_place(report.replica, report.rank)} captures {', '.join(report.points)} "
        f"(boundaries {boundaries}) by {by}, as {report.source} asks; witness {report.verdict}{shown}"
    )


def _reason(report: Report) -> str:
    if report.verdict == "failed":
        return report.message
    return f"it captures {', '.join(report.points)}, as {report.source} asks. {report.message}"


def _names(reports: Sequence[Report]) -> str:
    return ", ".join(_place(report.replica, report.rank) for report in reports)


def _place(replica: int, rank: int) -> str:
    return f"rank {rank}" if replica == 0 else f"rank {rank} of replica {replica}"


def _say(text: str) -> None:
    print(f"capture-hooks: {text}", flush=True)
