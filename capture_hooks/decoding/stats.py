"""What a decoding run did: rounds, acceptance, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """One draft and its verification pass.

    Attributes:
        tokens: tokens gained, the target's own last one included; cut at a stop.
        drafted: drafted tokens that were verified.
        depth: longest drafted path.
        accepted: drafted tokens accepted (before a cut).
        draft_seconds: time the head took, rows appended after the last round included.
        verify_seconds: time of the target's pass.
        other_seconds: everything else in the round.
    """

    tokens: tuple[int, ...]
    drafted: int
    depth: int
    accepted: int
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """Sums over the rounds of one or more sequences.

    ``reached[i]`` counts rounds in which position i was drafted after positions before it were
    accepted, ``accepted[i]`` those in which it was accepted too.  For a tree, a position is a depth.
    """

    sequences: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0

    @classmethod
    def of(cls, rounds: Iterable[Round], prefill_seconds: float = 0.0) -> DecodeStats:
        """Stats of one sequence; ``tokens`` leaves out the first, which the prefill gives."""
        items = list(rounds)
        depth = max((r.depth for r in items), default=0)
        return cls(
            sequences=1,
            rounds=len(items),
            tokens=sum(len(r.tokens) for r in items),
            drafted=sum(r.drafted for r in items),
            reached=tuple(sum(r.depth > i and r.accepted >= i for r in items) for i in range(depth)),
            accepted=tuple(sum(r.accepted > i for r in items) for i in range(depth)),
            prefill_seconds=prefill_seconds,
            draft_seconds=sum(r.draft_seconds for r in items),
            verify_seconds=sum(r.verify_seconds for r in items),
            other_seconds=sum(r.other_seconds for r in items),
        )

    def __add__(self, other: DecodeStats) -> DecodeStats:
        depth = max(len(self.reached), len(other.reached))

        def total(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            pad = (0,) * depth
            return tuple(x + y for x, y in zip((a + pad)[:depth], (b + pad)[:depth], strict=True))

        return DecodeStats(
            self.sequences + other.sequences,
            self.rounds + other.rounds,
            self.tokens + other.tokens,
            self.drafted + other.drafted,
            total(self.reached, other.reached),
            total(self.accepted, other.accepted),
            self.prefill_seconds + other.prefill_seconds,
            self.draft_seconds + other.draft_seconds,
            self.verify_seconds + other.verify_seconds,
            self.other_seconds + other.other_seconds,
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per verification pass, the bonus token included; NaN without a round."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """Acceptance at each draft position given that the positions before it were accepted."""
        return tuple(a / r if r else float("nan") for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def round_seconds(self) -> float:
        """Mean wall time of one round."""
        total = self.draft_seconds + self.verify_seconds + self.other_seconds
        return total / self.rounds if self.rounds else float("nan")

    def to_json(self) -> dict[str, Any]:
        """Counts and derived figures as plain values."""
        return {
            "sequences": self.sequences,
            "rounds": self.rounds,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "reached": list(self.reached),
            "accepted": list(self.accepted),
            "acceptance_length": self.acceptance_length if self.rounds else None,
            "conditional_acceptance": [
                a / r if r else None for a, r in zip(self.accepted, self.reached, strict=True)
            ],
            "seconds": {
                "prefill": self.prefill_seconds,
                "draft": self.draft_seconds,
                "verify": self.verify_seconds,
                "other": self.other_seconds,
            },
        }
