"""What each rank of a server reports.  No report is a failure: an engine may hide a plugin's errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import EngineError
from ..heads.fit import Verdict, WiringFit
from ..io import hand_over

#: What a witness that does not fit does: nothing, a warning, or refusing to serve.
VERIFY: Final = "CAPTURE_HOOKS_VERIFY"
#: A directory where every rank reports what it captures and how the witness fits.
HANDSHAKE: Final = "CAPTURE_HOOKS_HANDSHAKE"

Verify = Literal["off", "warn", "strict"]
#: A witness's verdict, or that there was none to show, or that it never came to it.
Outcome = Verdict | Literal["unverified", "failed"]
_WORSE: Final[tuple[Verdict, ...]] = ("matches", "drift", "undetermined", "mismatch")


@dataclass(frozen=True, slots=True)
class Proof:
    """What the witness showed.

    Attributes:
        paths: the fit of each path that feeds the draft head, by name.
    """

    paths: dict[str, WiringFit]

    @property
    def verdict(self) -> Verdict:
        """The worst of the paths'."""
        return max((fit.verdict for fit in self.paths.values()), key=_WORSE.index)

    def __str__(self) -> str:
        worst = [f"{name}: {fit}" for name, fit in self.paths.items() if fit.verdict == self.verdict]
        # The same slots fail in every path when the wiring is wrong: say it once.
        if len({str(fit) for fit in self.paths.values()}) == 1 or self.verdict == "mismatch":
            return f"{worst[0]}" + (f" (and {len(worst) - 1} more paths)" if len(worst) > 1 else "")
        return "\n".join(worst)


def serve_or_refuse(verdict: Outcome, message: str, verify: Verify, logger: logging.Logger) -> None:
    """Let a process that was judged serve, with a line in its log, or stop it.

    Raises:
        EngineError: in strict mode, when another wiring fits better or the evidence is too thin.
    """
    if verdict in ("matches", "unverified"):
        logger.info("capture-hooks: witness %s %s", verdict, message)
    elif verdict == "drift" or verify == "warn":
        logger.warning("capture-hooks: witness %s", message)
    else:
        raise EngineError(f"this server would feed the head other states than it was trained on. {message}")


class RankReport(BaseModel):
    """One rank's report.

    Attributes:
        rank: its number among the tensor-parallel ranks.
        replica: its data-parallel replica.
        source: who asked for capture.
        points: what is captured, in the order delivered.
        boundaries: of each point.
        mechanism: ``native`` or ``hooks``.
        reason: why not native.
        verdict: of the witness; *unverified* without one, *failed* where it never came to it.
        message: the reasons, one path or slot a line.
        ranks: how many there are in all replicas, where the rank knows.
        settings: how the engine resolved what changes the bits, where the rank knows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    replica: int
    source: str
    points: list[str]
    boundaries: list[int | None]
    mechanism: str
    reason: str
    verdict: Outcome
    message: str
    ranks: int | None = None
    settings: dict[str, str] = Field(default_factory=dict)

    def write(self, directory: Path) -> None:
        """Leave the report in ``directory``, whole or not at all."""
        path = directory / f"replica-{self.replica}-rank-{self.rank}.json"
        hand_over(path, lambda place: place.write_text(self.model_dump_json(indent=2)))

    def described(self, engine: str) -> str:
        """A line or two for people."""
        place = place_of(self.replica, self.rank)
        if self.verdict == "failed":
            return f"{place} refused: {self.message}"
        by = f"{engine}'s own capture" if self.mechanism == "native" else f"hooks ({self.reason})"
        boundaries = ", ".join("-" if boundary is None else str(boundary) for boundary in self.boundaries)
        shown = "" if self.verdict == "matches" else f": {self.message}"
        return (
            f"{place} captures {', '.join(self.points)} (boundaries {boundaries}) by {by}, as {self.source} "
            f"asks; witness {self.verdict}{shown}"
        )


def place_of(replica: int, rank: int) -> str:
    """What a rank is called."""
    return f"rank {rank}" if replica == 0 else f"rank {rank} of replica {replica}"


def read_reports(directory: Path) -> list[RankReport]:
    """Every report in ``directory``, by replica and rank."""
    found = []
    for path in sorted(directory.glob("replica-*.json")):
        try:
            found.append(RankReport.model_validate(json.loads(path.read_text())))
        except (OSError, ValueError, ValidationError):
            continue  # written by someone else; a missing rank is what its reader acts on
    return sorted(found, key=lambda report: (report.replica, report.rank))


def directory_of(environment: Mapping[str, str], name: str) -> Path | None:
    """The directory a setting names, if it does."""
    value: Any = environment.get(name)
    return Path(value) if value else None


def verify_of(environment: Mapping[str, str]) -> Verify:
    """What `VERIFY` asks for; *strict* where it is not set.

    Raises:
        EngineError: another value than it takes.
    """
    value = environment.get(VERIFY, "strict")
    if value not in get_args(Verify):
        raise EngineError(f"{VERIFY} is {value!r}; it takes {', '.join(get_args(Verify))}")
    return cast(Verify, value)
