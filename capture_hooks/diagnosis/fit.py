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
from ..heads.witness import FEWEST, SAME, Witness, relative_errors
from ..spec import Point

Verdict = Literal["matches", "drift", "mismatch", "undetermined"]

#: Another state must be so many times nearer to the witness before it is named.
MARGIN: Final = 2.0
#: A state this far from the witness, with none nearer, is of another model: unrelated states measure 1 or
#: more, and the coarsest usable quantisation (4 bits on a 135M model) about 0.4.
UNLIKE: Final = 0.8


@dataclass(frozen=True, slots=True)
class SlotFit:
    """One slot of what the head eats.

    Attributes:
        slot: its number in the order delivered.
        expected: the point the head was trained on.
        error: how far the delivered states are from the witness; median over tokens, 0 is equal.
        best: the state of this engine that is nearest to the witness, by name.
        best_error: how far that one is.
        holds: the state of this engine that was delivered, by name; empty where none is near it.
    """

    slot: int
    expected: str
    error: float
    best: str
    best_error: float
    holds: str

    @property
    def verdict(self) -> Verdict:
        """*matches*, *drift* (the right state, computed otherwise), or *mismatch* (another state)."""
        if self.error <= SAME:
            return "matches"
        if self.best_error * MARGIN < self.error or self.error > UNLIKE:
            return "mismatch"
        return "drift"

    def __str__(self) -> str:
        if self.verdict != "mismatch":
            return f"slot {self.slot} ({self.expected}) is {self.error:.2g} from the witness"
        text = f"slot {self.slot} should hold {self.expected}"
        if self.holds:
            text += f" and holds {self.holds}"
        text += f", {self.error:.2g} from the witness"
        if self.best_error * MARGIN < self.error:
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
        HeadError: shapes that do not belong together.
    """
    tokens = len(witness.token_ids)
    rows = torch.arange(tokens) if rows is None else rows
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
        error = _distance(slot[kept], wanted)
        others = {name: _distance(state, wanted) for name, state in here.items()} or {str(point): error}
        best = min(others, key=lambda name: (others[name], name != str(point)))
        held = {name: _distance(slot[kept], state) for name, state in here.items()}
        holds = min(held, key=lambda name: (held[name], name != str(point)), default="")
        near = holds if holds and held[holds] <= SAME else ""
        found.append(SlotFit(number, str(point), error, best, others[best], near))
    return WiringFit(tuple(found), int(kept.sum()))


def _shifted(name: str, state: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The same point one token earlier and later; the ends stay where they are."""
    last = len(state) - 1
    return {
        f"{name} of the token before": state[(rows - 1).clamp(min=0)],
        f"{name} of the token after": state[(rows + 1).clamp(max=last)],
    }


def _distance(theirs: Tensor, ours: Tensor) -> float:
    return float(relative_errors(theirs, ours).median()) if len(ours) else float("inf")
