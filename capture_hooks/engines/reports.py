"""What each rank of a server reports.  Silence is not success: an engine may swallow a plugin's errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import EngineError
from ..heads.fit import Verdict
from ..io import hand_over

#: What a witness that does not fit does: nothing, a warning, or refusing to serve.
VERIFY: Final = "CAPTURE_HOOKS_VERIFY"
#: A directory where every rank reports what it captures and how the witness fits.
HANDSHAKE: Final = "CAPTURE_HOOKS_HANDSHAKE"

Verify = Literal["off", "warn", "strict"]
#: A witness's verdict, or that there was none to show, or that it never came to it.
Outcome = Verdict | Literal["unverified", "failed"]


class Report(BaseModel):
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


def read_reports(directory: Path) -> list[Report]:
    """Every report in ``directory``, by replica and rank."""
    found = []
    for path in sorted(directory.glob("replica-*.json")):
        try:
            found.append(Report.model_validate(json.loads(path.read_text())))
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
