"""Cross-entropy against the target's distribution, chunk by chunk, for all steps at once.

One target row teaches up to J draft rows (one per step), so its distribution is computed once.
Logits exist for one chunk of rows of one step at a time.  With a frozen ``lm_head`` the gradient is
formed in the same pass; with a trained one the chunk's logits are computed again in the backward pass.
"""

# mypy: disable-error-code="no-untyped-call, override, type-arg, misc"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from capture_hooks.heads.contract import TargetReadout

from .functional import accumulation_dtype
from .plan import TrainingPlan


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the draft rows learn.

    Attributes:
        states: [R, H] target states of the plan's target rows.
        readout: restricted to the draft vocabulary (``weight`` [D, H]).
        greedy: [R] the target's greedy token as a draft-vocabulary id, -1 where it has none.
        plan: which draft rows each teaches.
    """

    states: Tensor
    readout: TargetReadout
    greedy: Tensor
    plan: TrainingPlan


def soft_target_loss(hidden: Tensor, weight: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Summed cross-entropies [J] (differentiable) and hits [J].

    Args:
        hidden: [M, H] normed outputs of the counted rows, step after step.
        weight: [D, H] ``lm_head``, in the dtype to multiply in.
        teacher: the distributions.
    """
    return _Loss.apply(hidden, weight, teacher)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows ``start:end`` of ``hidden`` that chunk ``chunk`` teaches at step ``step``."""

    step: int
    start: int
    end: int


def _chunks(teacher: Teacher) -> Iterator[tuple[slice, list[_Piece]]]:
    """Slices of the target rows with the pieces of ``hidden`` each teaches."""
    plan, total = teacher.plan, teacher.states.shape[0]
    offsets = [0]
    for step in plan.steps:
        offsets.append(offsets[-1] + step.counted.shape[0])
    for index, start in enumerate(range(0, total, plan.chunk)):
        pieces = []
        for j, step in enumerate(plan.steps):
            low, high = step.bounds[index], step.bounds[index + 1]
            if low < high:
                pieces.append(_Piece(j, offsets[j] + low, offsets[j] + high))
        yield slice(start, min(start + plan.chunk, total)), pieces


def _probabilities(teacher: Teacher, rows: slice, dtype: torch.dtype) -> Tensor:
    """The target's distributions over the draft vocabulary, in the type that the head adds up in."""
    logits = teacher.readout.logits(teacher.states[rows])
    return logits.to(accumulation_dtype(logits.dtype)).softmax(-1).to(dtype)


def _taught(x: Tensor, teacher: Teacher, rows: slice, piece: _Piece) -> Tensor:
    """Rows of ``x`` (one per target row of the chunk) that teach at this step."""
    if piece.end - piece.start == x.shape[0]:
        return x
    return x[teacher.plan.last_step[rows] >= piece.step]


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
        wide = accumulation_dtype(hidden.dtype)
        steps = len(teacher.plan.steps)
        loss, hits = hidden.new_zeros(steps, dtype=wide), hidden.new_zeros(steps, dtype=wide)
        at_once = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden) if at_once else None
        for rows, pieces in _chunks(teacher):
            target = _probabilities(teacher, rows, wide)
            greedy = teacher.greedy[rows]
            for piece in pieces:
                here = slice(piece.start, piece.end)
                p = _taught(target, teacher, rows, piece)
                logits = F.linear(hidden[here], weight).to(wide)
                best, choice = logits.max(-1)
                hits[piece.step] += (choice == _taught(greedy, teacher, rows, piece)).sum()
                # Each row of p sums to one, so -sum(p log_softmax) = logsumexp - p . logits.
                dots = torch.dot(p.flatten(), logits.flatten())
                q = logits.softmax(-1)
                logsumexp = best - q.gather(-1, choice.unsqueeze(-1)).squeeze(-1).log()
                loss[piece.step] += logsumexp.sum() - dots
                if d_hidden is not None:
                    d_hidden[here] = q.sub_(p).to(hidden.dtype) @ weight
        ctx.teacher = teacher
        ctx.mark_non_differentiable(hits)
        ctx.save_for_backward(hidden, weight, d_hidden)
        return loss, hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, d_hidden = ctx.saved_tensors
        teacher: Teacher = ctx.teacher
        if d_hidden is not None:
            sizes = torch.tensor([s.counted.shape[0] for s in teacher.plan.steps], device=grad.device)
            factors = torch.repeat_interleave(grad, sizes, output_size=hidden.shape[0])
            return d_hidden * factors.unsqueeze(1).to(d_hidden.dtype), None, None
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        for rows, pieces in _chunks(teacher):
            target = _probabilities(teacher, rows, grad.dtype)
            for piece in pieces:
                here = slice(piece.start, piece.end)
                logits = F.linear(hidden[here], weight)
                d_logits = logits.to(grad.dtype).softmax(-1).sub_(_taught(target, teacher, rows, piece))
                d_logits = d_logits.mul_(grad[piece.step]).to(hidden.dtype)
                if d_hidden is not None:
                    d_hidden[here] = d_logits @ weight
                d_weight += d_logits.t() @ hidden[here]
        return d_hidden, d_weight.to(weight.dtype), None
