"""Is a greedy answer the target's own?  And where it is not, could rounding alone explain it?

A pass over several tokens uses other kernels than a pass over one, so two nearly equal logits may
change places.  The excuse is granted only where the target's own numbers give it: the gap between its
two best logits at the first differing token must be smaller than the difference that the number of
rows in the pass makes to its logits at that very place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..heads.drafting import Proposal
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
    target: Target,
    prompt: Tensor,
    ours: Tensor,
    reference: Tensor,
    rows: int,
    source: str = "",
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Divergence | None:
    """None where two greedy answers are the same, else where they part.

    Args:
        target: the decoder's target; its sequence is replaced.
        prompt: [N] token ids.
        ours: answer [T].
        reference: the target's own answer [U].
        rows: most rows of a verification pass.
        source: the prompt's name in the result.
        inputs: `Request.inputs` of a prompt with images; the others are run as text.
    """
    a, b = ours.tolist(), reference.tolist()
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    # The pass over images cannot be divided: what is run in several ways comes after it.
    shown = prompt.tolist() if inputs else []
    context = [] if inputs else prompt.tolist()
    context += b[:at]
    single = _logits(target, shown, context, 1, inputs)
    best = single.topk(2).values
    most = target.anatomy.lengths.most_rows
    # More rows in a pass than the target computes alike would show more than rounding.
    length = len(shown) + len(context)
    counts = (n for n in range(2, rows + 1) if n <= (most(max(length - n, 0)) or n))
    others = (_logits(target, shown, context, n, inputs) for n in counts)
    noise = max((float((other - single).abs().max()) for other in others), default=0.0)
    return Divergence(
        source,
        at,
        a[at] if at < len(a) else None,
        b[at] if at < len(b) else None,
        float(best[0] - best[1]),
        noise,
    )


@torch.inference_mode()
def _logits(
    target: Target, shown: list[int], context: list[int], rows: int, inputs: Mapping[str, Any] | None
) -> Tensor:
    """[V] logits after ``shown + context``, the last ``rows`` tokens in one pass over a cache of the others.

    ``shown`` is run in a pass of its own with ``inputs``; at most what follows it is in the last one.
    """
    rows = min(rows, len(context) if shown else len(context) - 1)
    target.start(len(shown) + len(context), inputs)
    before, last = context[: len(context) - rows], context[len(context) - rows :]
    for tokens in (shown, before, last):
        if not tokens:
            continue
        if target.length == 0:
            logits, _ = target.prefill(torch.tensor([tokens], device=target.device))
        else:
            root, *rest = tokens
            chain = Proposal.chain(rest)
            logits, _ = target.verify(root, chain)
            if tokens is not last:
                target.commit(chain, range(1, len(tokens)))
    return logits[-1].float()
