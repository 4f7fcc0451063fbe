"""Is a greedy answer the target's own?  And where it is not, could rounding alone explain it?

A pass over several tokens uses other kernels than a pass over one, so two nearly equal logits may
change places.  The excuse is granted only where the target's own numbers give it: the gap between its
two best logits at the first differing token must be smaller than the difference that the number of
rows in the pass makes to its logits at that very place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .drafts import Draft
from .target import Target


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two greedy answers part.

    Attributes:
        source: which prompt.
        position: index in the answer.
        ours, reference: the two tokens (None: that answer ended here).
        gap: the target's best logit minus its second best, one row at a time.
        noise: largest change of any logit there between one row and several rows in a pass.
    """

    source: str
    position: int
    ours: int | None
    reference: int | None
    gap: float
    noise: float

    @property
    def excused(self) -> bool:
        """Whether the gap lies below the target's own noise."""
        return self.gap < self.noise

    def __str__(self) -> str:
        verdict = "below" if self.excused else "ABOVE"
        return (
            f"token {self.position + 1}: {self.ours} instead of {self.reference}; the target's top-two gap "
            f"{self.gap:.2g} is {verdict} its own noise {self.noise:.2g}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "source": self.source,
            "position": self.position,
            "ours": self.ours,
            "reference": self.reference,
            "gap": self.gap,
            "noise": self.noise,
            "excused": self.excused,
        }


def compare(
    target: Target, prompt: Tensor, ours: Tensor, reference: Tensor, rows: int, source: str = ""
) -> Divergence | None:
    """None where two greedy answers are the same, else where they part.

    Args:
        target: the decoder's target; its sequence is replaced.
        prompt: [N] token ids.
        ours: answer [T].
        reference: the target's own answer [U].
        rows: most rows of a verification pass.
        source: the prompt's name in the result.
    """
    a, b = ours.tolist(), reference.tolist()
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    context = prompt.tolist() + b[:at]
    single = _logits(target, context, 1)
    best = single.topk(2).values
    most = target.anatomy.lengths.most_rows
    # More rows in a pass than the target computes alike would show more than rounding.
    counts = (n for n in range(2, rows + 1) if n <= (most(max(len(context) - n, 0)) or n))
    noise = max((float((_logits(target, context, n) - single).abs().max()) for n in counts), default=0.0)
    return Divergence(
        source,
        at,
        a[at] if at < len(a) else None,
        b[at] if at < len(b) else None,
        float(best[0] - best[1]),
        noise,
    )


@torch.inference_mode()
def _logits(target: Target, context: list[int], rows: int) -> Tensor:
    """[V] logits after ``context`` with its last ``rows`` tokens in one pass over a cache of the others."""
    rows = min(rows, len(context) - 1)
    target.start(len(context))
    if rows < 1:
        logits, _ = target.prefill(torch.tensor([context], device=target.device))
        return logits[-1].float()
    target.prefill(torch.tensor([context[:-rows]], device=target.device))
    root, *rest = context[-rows:]
    logits, _ = target.verify(root, Draft(tuple(rest), tuple(range(len(rest)))))
    return logits[-1].float()
