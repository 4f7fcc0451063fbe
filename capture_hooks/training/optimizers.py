"""Muon for the head's matrices and AdamW for the rest, as the one optimiser that the Trainer drives.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; `torch.optim.Muon`, torch >= 2.9)
moves every matrix by the nearest orthogonal one to its momentum.  With the step's size matched to
AdamW's (Moonshot AI, arXiv 2502.16982) one learning rate and weight decay serve both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from ..errors import TrainingError
from ..heads.contract import DraftHead
from .config import TrainConfig


class MuonWithAdamW(Optimizer):
    """Two optimisers over disjoint parameters that share one list of groups and one state.

    Args:
        matrices: 2-D weights, moved by Muon.
        others: everything else, moved by AdamW without weight decay.
        lr, weight_decay, betas: AdamW's; Muon takes the rate and the decay too.

    Raises:
        TrainingError: if this torch has no Muon.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise TrainingError(
                f"optimizer=muon needs torch >= 2.9 (this is {torch.__version__}); use optimizer=adamw"
            )
        self._muon = torch.optim.Muon(
            [{"params": [*matrices]}], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = AdamW([{"params": [*others]}], lr=lr, betas=betas, weight_decay=0.0)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """A schedule, a checkpoint or a logger sees one optimiser: both parts read its groups and state."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()  # type: ignore[no-untyped-call]  # so in torch
        self._adamw.step()
        return loss


def muon_for(head: DraftHead, config: TrainConfig) -> MuonWithAdamW:
    """Muon for the trained matrices of ``head``, save its `token_tables`; AdamW for the rest."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            chosen = matrices if weight.ndim == 2 and name not in head.token_tables else others
            chosen.append(weight)
    return MuonWithAdamW(matrices, others, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas)
