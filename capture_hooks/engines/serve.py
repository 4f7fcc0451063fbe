"""``serve``: run a server until it is asked to stop, once every rank has reported that it is right."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..errors import EngineError
from .command import ServerCommand
from .process import TICK, EngineProcess, Signals, started
from .reports import VERIFY, RankReport, place_of

#: Seconds a server gets to finish its requests and stop.
GRACE: Final = 30.0
#: Seconds between two questions whether it is ready.
_ASK: Final = 1.0


def follow(
    engine: str,
    kind: str,
    command: ServerCommand,
    environment: Mapping[str, str],
    start_timeout: float,
    ranks_of: Callable[[EngineProcess], set[tuple[int, int]] | None],
) -> int:
    """Run a server until it is asked to stop.

    Args:
        engine: its name, for messages.
        kind: what its processes that must report are called.
        command: what to run.
        environment: for it; a directory for the reports is added.
        start_timeout: seconds until it must be ready.
        ranks_of: told a server, which ranks (replica, rank) it runs; None while it is not ready.  Raises
            EngineError where that cannot be known.

    Returns:
        128 and the signal's number, by which it was asked to stop.

    Raises:
        EngineError: a rank refused, or did not report; the server ended by itself, or was not ready in time.
            All its processes are gone by then.
    """
    strict = environment.get(VERIFY) != "warn"
    with Signals() as signals, started(engine, command, environment, quiet=False) as process:
        told: set[tuple[int, int]] = set()

        def waits() -> bool:
            if signals.received:
                return False
            _tell(process, engine, told)
            if refusal := _refusal(process.reports, strict):
                raise EngineError(refusal)
            return True

        failure: EngineError | None = None
        try:
            ranks = process.until_ready(ranks_of, start_timeout, _ASK, waits)
            if ranks is not None:
                _tell(process, engine, told)
                _check_reports(engine, kind, ranks, process.reports)
                verdicts = ", ".join(sorted({report.verdict for report in process.reports}))
                count = f"all {len(ranks)} ranks" if len(ranks) > 1 else "its rank"
                _say(f"serving at {command.url}; reported by {count}: witness {verdicts}")
            while not signals.received:
                if not process.alive:
                    raise EngineError(process.obituary())
                time.sleep(TICK)
        except TimeoutError:
            failure = EngineError(
                f"the server was stopped: not ready after {start_timeout:g} s (--start-timeout)"
            )
        except EngineError as error:
            failure = error
        before = len(signals.received)
        process.stop(GRACE, lambda: len(signals.received) > before)
        print(flush=True)  # what it printed last need not have ended its line
        if failure is not None:
            # A rank may have written why while everything was ending.
            raise EngineError(_refusal(process.reports, strict) or str(failure))
        _say(f"the server was stopped, by {signals.received[0].name}")
        return 128 + signals.received[0]


def _refusal(reports: Sequence[RankReport], strict: bool) -> str | None:
    """Why a rank that reported must not be served."""
    bad = {"failed"} | ({"mismatch", "undetermined"} if strict else set())
    reasons: dict[str, list[str]] = {}
    for report in reports:
        if report.verdict in bad:
            reasons.setdefault(_reason(report), []).append(place_of(report.replica, report.rank))
    if not reasons:
        return None
    lines = [f"{', '.join(places)}: {reason}" for reason, places in reasons.items()]
    return "\n".join(["the server was stopped; it must not serve this head", *lines])


def _reason(report: RankReport) -> str:
    if report.verdict == "failed":
        return report.message
    return f"it captures {', '.join(report.points)}, as {report.source} asks. {report.message}"


def _tell(process: EngineProcess, engine: str, told: set[tuple[int, int]]) -> None:
    for report in process.reports:
        if (place := (report.replica, report.rank)) not in told:
            told.add(place)
            _say(report.described(engine))


def _check_reports(
    engine: str, kind: str, ranks: set[tuple[int, int]], reports: Sequence[RankReport]
) -> None:
    """Every rank reported, and all the same capture.

    Raises:
        EngineError: naming those that did not, or what they report.
    """
    if missing := sorted(ranks - {(report.replica, report.rank) for report in reports}):
        silent = ", ".join(place_of(*place) for place in missing)
        raise EngineError(
            f"the server was stopped: {len(missing)} of its {len(ranks)} {kind} never reported what they "
            f"capture ({silent}), so the plugin took no effect there and the head may be fed anything; "
            f"{engine} logs above which plugins it loaded, and why not"
        )
    captures = {f"{', '.join(r.points)} at boundaries {r.boundaries}" for r in reports}
    if len(captures) > 1:
        raise EngineError(f"the server was stopped: its ranks capture differently: {sorted(captures)}")


def _say(text: str) -> None:
    print(f"capture-hooks: {text}", flush=True)
