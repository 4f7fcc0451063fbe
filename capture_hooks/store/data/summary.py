"""A summary of how a data set was read: forms, columns without effect, rows left out, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .encoding import Counts
from .records import RowError

#: Places named for each reason.
_PLACES = 3


@dataclass(frozen=True, slots=True)
class BadRows:
    """Rows left out for one reason: how many, where the first stand, and what is wrong with the first."""

    reason: str
    count: int
    first: tuple[str, ...]
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """How a data set was read.

    Attributes:
        rows: all of them, those left out too.
        counts: see `Counts`.
        bad: rows left out, the most frequent reason first.
    """

    rows: int = 0
    counts: Counts = field(default_factory=Counts)
    bad: tuple[BadRows, ...] = ()

    @property
    def left_out(self) -> int:
        """Rows that could not be used."""
        return sum(bad.count for bad in self.bad)

    def lines(self) -> list[str]:
        """What a person should know, a sentence each; nothing where all was taken as it stood."""
        said = self.notes()
        if self.bad:
            said.append(
                f"left out {self.left_out:,} of {self.rows:,} rows ({self.left_out / self.rows:.2%}):"
            )
            said += [f"  {bad.count:,} x {bad.reason}: first {', '.join(bad.first)}" for bad in self.bad]
        return said

    def notes(self) -> list[str]:
        """The same without the rows that were left out."""
        counts, notes = self.counts, self.counts.notes
        said = []
        if len(counts.forms) > 1:
            said.append("forms: " + _listed(counts.forms))
        if counts.whole and counts.by_turn:
            said.append(
                f"{_conversations(counts.whole)} in one sequence each; {counts.by_turn:,} turn by turn, "
                "because the chat template rewrites their earlier turns"
            )
        elif counts.by_turn:
            said.append(f"{_conversations(counts.by_turn)} turn by turn")
        elif counts.whole:
            said.append(f"{_conversations(counts.whole)}, each in one sequence with all its turns")
        if counts.images:
            said.append(f"images: {counts.images:,}; such conversations run one by one")
        if counts.unread:
            said.append("columns not read: " + _listed(counts.unread))
        if notes.unread:
            said.append("fields of turns that the chat template does not print: " + _listed(notes.unread))
        if notes.joined:
            said.append(
                f"{notes.joined:,} messages of several text parts, each on a line of its own as vLLM joins "
                "them (SGLang joins them by spaces)"
            )
        if notes.openings:
            said.append(
                f"{notes.openings:,} conversations begin with the assistant: that turn is context, not learnt"
            )
        if counts.nulls:
            said.append(
                f"{counts.nulls:,} rows with empty fields in tools or arguments, taken for padding: this "
                "form of data cannot tell them from a null, and gives all rows' fields one order (as JSON "
                "lines, or with arguments and tools as JSON texts, neither happens)"
            )
        return said


class BadRowCounter:
    """Collects the rows that are left out."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}
        self._examples: dict[str, str] = {}
        self.first: RowError | None = None

    def add(self, error: RowError) -> None:
        """Count one row that is left out."""
        self.first = self.first or error
        self._counts[error.reason] += 1
        self._examples.setdefault(error.reason, str(error))
        places = self._places.setdefault(error.reason, [])
        if len(places) < _PLACES:
            places.append(error.place)

    def found(self) -> tuple[BadRows, ...]:
        """The rows left out, grouped by reason."""
        return tuple(
            BadRows(reason, count, tuple(self._places[reason]), self._examples[reason])
            for reason, count in self._counts.most_common()
        )


def _conversations(count: int) -> str:
    return f"{count:,} conversation{'s' * (count != 1)}"


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in counter.most_common())
