"""Which sequences a model computes alike: some RoPE scalings go by the longest position of a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How the rows of one forward depend on its length, apart from what attention sees.

    Attributes:
        switches: numbers of positions; a forward that reaches beyond one computes all its rows otherwise
            than a shorter one does (LongRoPE's original context).
        separate: a forward that reaches beyond this many positions must hold one sequence, or one more token
            of it, alone (dynamic NTK scaling); None where there is no such number.
        forget: makes the model forget the longest sequence it has seen; called before a new one.
    """

    switches: frozenset[int] = frozenset()
    separate: int | None = None
    forget: Callable[[], None] = _nothing

    def alike(self, one: int, other: int) -> bool:
        """Whether a sequence of one length may share a forward with, or be padded to, the other."""
        longest = max(one, other)
        if self.separate is not None and longest > self.separate:
            return False
        return not any(min(one, other) <= switch < longest for switch in self.switches)

    def most_rows(self, past: int) -> int | None:
        """Rows that may follow ``past`` cached ones in one forward as if each came alone; None for any."""
        if self.separate is not None and past >= self.separate:
            return 1
        ends = [end - past for end in (*self.switches, self.separate) if end is not None and end > past]
        return min(ends, default=None)
