"""Which wiring do an engine's states fit: the one the head was trained on, or another one better?

Every slot that an engine delivered is compared with the witness (per token, channels scaled, the first
token of each sequence left out), and so are the states that the same engine holds elsewhere: at every
boundary, or one token away.  The verdict needs no threshold that a precision could cross: a slot is wrong
when *another* state of the same engine, under the same precision, is clearly nearer to the witness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from ..errors import HeadError
from ..spec import Point
from .witness import FEWEST, OTHER, SAME, Witness, relative_errors

Verdict = Literal["matches", "drift", "mismatch", "undetermined"]

#: Another state must be so many times nearer to the witness before it is named.
MARGIN: Final = 2.0
#: A state this far from the witness, with none nearer, is of another model: unrelated states measure 1 or
#: more, and the coarsest usable quantisation (4 bits on a 135M model) about 0.4.
UNLIKE: Final = 0.8


@dataclass(frozen=True, slots=True)
class SlotFit:
    """One slot of the head's input.

    Attributes:
        slot: its number in the order delivered.
        expected: the point the head was trained on.
        error: how far the delivered states are from the witness; median over tokens, 0 is equal.
        best: the state of this engine that is nearest to the witness, by name.
        best_error: how far that one is.
        holds: the state of this engine that was delivered, by name; empty where none is near it.
        astray: rows that are of another state, where the most are not (a part of a pass, or not finite).
        tokens: rows that were compared.
    """

    slot: int
    expected: str
    error: float
    best: str
    best_error: float
    holds: str
    astray: int
    tokens: int

    @property
    def verdict(self) -> Verdict:
        """*matches*, *drift* (the right state, computed otherwise), or *mismatch* (another state)."""
        if self.astray or self.error > UNLIKE or self._another_is_nearer:
            return "mismatch"
        return "matches" if self.error <= SAME else "drift"

    @property
    def _another_is_nearer(self) -> bool:
        """Clearly; the delivered state in another precision is no other state."""
        itself = self.best == self.holds == self.expected
        return self.error > SAME and self.best_error * MARGIN < self.error and not itself

    def __str__(self) -> str:
        if self.verdict != "mismatch":
            return f"slot {self.slot} ({self.expected}) is {self.error:.2g} from the witness"
        if self.astray and self.error <= UNLIKE and not self._another_is_nearer:
            return (
                f"slot {self.slot} holds {self.expected} for most tokens, and something else for "
                f"{self.astray} of {self.tokens}"
            )
        text = f"slot {self.slot} should hold {self.expected}"
        if self.holds:
            text += f" and holds {self.holds}"
        text += f", {self.error:.2g} from the witness"
        if self._another_is_nearer:
            return f"{text}, where this model's {self.best} is {self.best_error:.2g} from it"
        return f"{text}, and no state of this model is near it: other target weights?"


@dataclass(frozen=True, slots=True)
class WiringFit:
    """All slots, as delivered through one path of an engine.

    Attributes:
        slots: one for each input of the head.
        tokens: how many tokens were compared.
    """

    slots: tuple[SlotFit, ...]
    tokens: int

    @property
    def verdict(self) -> Verdict:
        """The worst of the slots'; *undetermined* with too few tokens."""
        if self.tokens < FEWEST:
            return "undetermined"
        found = {slot.verdict for slot in self.slots}
        if "mismatch" in found:
            return "mismatch"
        return "drift" if "drift" in found else "matches"

    @property
    def size(self) -> float:
        """The largest of the slots' errors."""
        return max(slot.error for slot in self.slots)

    def __str__(self) -> str:
        if self.verdict == "undetermined":
            return f"undetermined: {self.tokens} tokens can be compared, {FEWEST} are needed"
        wrong = [slot for slot in self.slots if slot.verdict == self.verdict]
        listed = wrong if self.verdict == "mismatch" else self.slots
        return f"{self.verdict} over {self.tokens} tokens: {'; '.join(map(str, listed))}"


def fit_wiring(
    witness: Witness,
    points: Sequence[Point],
    delivered: Tensor,
    states: Mapping[str, Tensor],
    rows: Tensor | None = None,
) -> WiringFit:
    """Judge what an engine delivered for the witness's tokens.

    Args:
        witness: the head's.
        points: what slot 0, 1, ... must be, in the order the engine delivers.
        delivered: [R, K*H] what reached the head.
        states: by point text, [T, H] what the engine holds at every token of the witness.
        rows: [R] which of the witness's T tokens ``delivered`` is for; None means all.

    Raises:
        HeadError: points that the witness lacks, or shapes that do not belong together.
    """
    tokens = len(witness.token_ids)
    rows = torch.arange(tokens) if rows is None else rows
    absent = [str(point) for point in points if str(point) not in witness.states]
    if absent or not points:
        raise HeadError(
            f"the witness holds {', '.join(witness.states)}; asked for: {', '.join(absent) or 'nothing'}"
        )
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < tokens:
        raise HeadError(f"rows {int(rows.min())} to {int(rows.max())} of a witness of {tokens} tokens")
    if short := sorted(name for name, state in states.items() if len(state) != tokens):
        raise HeadError(f"{', '.join(short)}: not one row for each of the witness's {tokens} tokens")
    truths = [witness.states[str(point)] for point in points]
    width = sum(truth.shape[1] for truth in truths)
    if delivered.shape != (len(rows), width):
        raise HeadError(
            f"the head eats {width} values for each of {len(rows)} tokens ({', '.join(map(str, points))}), "
            f"and {list(delivered.shape)} was delivered"
        )
    kept = ~torch.isin(rows, witness.starts[:-1])
    slots = torch.split(delivered.detach().cpu(), [truth.shape[1] for truth in truths], dim=1)
    found = []
    for number, (point, truth, slot) in enumerate(zip(points, truths, slots, strict=True)):
        wanted = truth[rows][kept]
        here = {name: state[rows][kept] for name, state in states.items() if state.shape == truth.shape}
        if str(point) in states:
            here |= _shifted(str(point), states[str(point)], rows[kept])
        errors = relative_errors(slot[kept], wanted) if len(wanted) else torch.empty(0)
        error = float(errors.median()) if len(errors) else float("inf")
        others = {name: _distance(state, wanted) for name, state in here.items()} or {str(point): error}
        best = min(others, key=lambda name: (others[name], name != str(point)))
        held = {name: _distance(slot[kept], state) for name, state in here.items()}
        holds = min(held, key=lambda name: (held[name], name != str(point)), default="")
        near = holds if holds and held[holds] <= OTHER else ""
        astray = _astray(errors, error)
        found.append(SlotFit(number, str(point), error, best, others[best], near, astray, len(errors)))
    return WiringFit(tuple(found), int(kept.sum()))


def _astray(errors: Tensor, middle: float) -> int:
    """Rows of something else among rows that are right; 0 where the slot as a whole is wrong or merely noisy.

    Where the rest is exact any row that is not is a fault.  Under drift a token in twenty may be far out.
    """
    if not torch.isfinite(errors).all():
        return int((~torch.isfinite(errors)).sum())
    if middle <= SAME:
        return int((errors > OTHER).sum())
    far = int((errors > UNLIKE).sum())
    return far if middle <= UNLIKE and far > len(errors) / 20 else 0


def _shifted(name: str, state: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The same point one token earlier and later; the ends stay where they are."""
    last = len(state) - 1
    return {
        f"{name} of the token before": state[(rows - 1).clamp(min=0)],
        f"{name} of the token after": state[(rows + 1).clamp(max=last)],
    }


def _distance(theirs: Tensor, ours: Tensor) -> float:
    return float(relative_errors(theirs, ours).median()) if len(ours) else float("inf")
