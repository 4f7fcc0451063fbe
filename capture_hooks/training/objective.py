"""A head as the module that `transformers.Trainer` wraps: tensors by name in, sums by name out.

DDP, FSDP and autocast wrappers look for tensors in plain containers, so the contract's dataclasses
are packed and unpacked here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..heads.contract import DraftHead, StepSums, TrainBatch


class Objective(nn.Module):
    """``head(TrainBatch)`` with keyword tensors; the head is its only child."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head
        # DDP need not compare and broadcast the target's rows that a head keeps as buffers.
        ignored = getattr(head, "_ddp_params_and_buffers_to_ignore", [])
        self._ddp_params_and_buffers_to_ignore = [f"head.{name}" for name in ignored]

    def forward(
        self,
        states: Tensor,
        target: Tensor,
        token_ids: Tensor,
        loss_mask: Tensor,
        starts: Tensor,
        argmax: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The fields of `StepSums`, each [J]; states are cast to the head's own precision."""
        states = states.to(trainable_dtype(self.head))
        sums: StepSums = self.head(TrainBatch(states, target, token_ids, loss_mask, starts, argmax))
        return {
            "loss": sums.loss,
            "weight": sums.weight.detach(),
            "hits": sums.hits.detach(),
            "rows": sums.rows.detach(),
            "factors": sums.factors.detach(),
        }


def trainable_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the parameters that are trained."""
    return next(p.dtype for p in module.parameters() if p.requires_grad)


def trainable_names(module: nn.Module) -> frozenset[str]:
    """Names of the head's own state: trained parameters and persistent buffers, without frozen parameters."""
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return frozenset(module.state_dict()) - frozen


def supervised_rows(loss_mask: Tensor, starts: Tensor) -> Tensor:
    """How many rows are scored at position 0 (a scalar).

    Behind row t position 0 holds the token x[t+2], so of each sequence the supervised tokens from the
    third on count.  The sum over all processes and accumulation steps divides the loss, so that the
    gradient does not depend on how a batch was divided.
    """
    position = torch.arange(len(loss_mask), device=starts.device)
    position -= torch.repeat_interleave(starts[:-1], starts.diff())
    return (loss_mask & (position >= 2)).sum()
