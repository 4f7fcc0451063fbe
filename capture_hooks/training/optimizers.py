"""How the weights move: the learning rate by progress, Muon for matrices, and the average of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import TrainingError
from ..heads.contract import DraftHead
from .config import Schedule, TrainConfig


def curve(progress: float, schedule: Schedule, warmup: float, minimum: float) -> float:
    """Share of the peak learning rate at ``progress`` in [0, 1]."""
    if progress < warmup:
        return progress / warmup
    done = min((progress - warmup) / (1 - warmup), 1.0)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[schedule]
    return minimum + (1 - minimum) * shape


class Progress:
    """How far a run has come: the share of its steps or of its time, whichever is more.

    Time is rank 0's, read once per step and sent to all, so that every process holds the same learning
    rate and stops at the same step.  Elapsed time is part of the run's state: a resumed run goes on
    where it stopped.

    Args:
        steps: optimiser steps of the whole run; None for a run bounded by time alone.
        seconds: its time budget; None for a run bounded by steps alone.
        now: the clock; another one makes a timed run reproducible.
    """

    def __init__(
        self, steps: int | None, seconds: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps, self.seconds, self._now = steps, seconds, now
        self.step = 0
        self.elapsed = 0.0
        self._before = 0.0
        self._start = now()

    def start(self, step: int, elapsed: float) -> None:
        """Continue from a stored state."""
        self.step, self.elapsed, self._before = step, elapsed, elapsed
        self._start = self._now()

    def advance(self) -> None:
        """Count one optimiser step and read the clock."""
        self.step += 1
        elapsed = self._before + self._now() - self._start
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            shared = torch.tensor([elapsed], dtype=torch.float64, device=device)
            dist.broadcast(shared, src=0)
            elapsed = float(shared.item())
        self.elapsed = elapsed

    @property
    def fraction(self) -> float:
        """Progress in [0, 1] after the steps counted so far."""
        return self._at(self.step)

    @property
    def middle_of_next(self) -> float:
        """Progress in the middle of the coming step: no step is spent at a rate of exactly zero."""
        return self._at(self.step + 0.5)

    def _at(self, step: float) -> float:
        by_steps = step / self.steps if self.steps else 0.0
        by_time = self.elapsed / self.seconds if self.seconds else 0.0
        return min(max(by_steps, by_time), 1.0)


class ProgressLR(LRScheduler):
    """Sets each group's rate to its initial rate times `curve` of the run's progress."""

    def __init__(self, optimizer: Optimizer, progress: Progress, shape: Callable[[float], float]) -> None:
        self.progress = progress
        self._shape = shape
        self._made = False
        super().__init__(optimizer)
        self._made = True

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates of the coming step."""
        factor = self._shape(self.progress.middle_of_next)
        return [base * factor for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Count an optimiser step, then set the rates of the coming one."""
        if self._made:  # the base class's constructor calls step() once, before any step was taken
            self.progress.advance()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers only, so that a checkpoint reads back without unpickling objects."""
        return {"last_epoch": self.last_epoch, "base_lrs": self.base_lrs,
                "step": self.progress.step, "elapsed": self.progress.elapsed}  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`'s step and elapsed time."""
        self.last_epoch = state_dict["last_epoch"]
        self.base_lrs = state_dict["base_lrs"]
        self.progress.start(state_dict["step"], state_dict["elapsed"])
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


class MuonWithAdamW(Optimizer):
    """Muon for matrices and AdamW for the rest: two optimisers with one list of groups and one state.

    Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; `torch.optim.Muon`, torch >= 2.9)
    moves every matrix by the nearest orthogonal one to its momentum.  With the step's size matched to
    AdamW's (Moonshot AI, arXiv 2502.16982) one learning rate and weight decay serve both.

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
        """One step of Muon and one of AdamW."""
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


class WeightAverage:
    """An exponential moving average of a module's trained parameters, often better than the last step's.

    Step t decays by ``min(decay, (1 + t) / (10 + t))``, so that a short run forgets its random start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self._weights = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after one optimiser step."""
        self.steps += 1
        share = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, weight in self._weights.items():
            self.average[name].lerp_(weight, share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block the module computes with the averaged weights."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the module's weights and the average."""
        for name, weight in self._weights.items():
            kept = weight.detach().clone()
            weight.copy_(self.average[name])
            self.average[name].copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors to store."""
        return {**self.average, "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`.

        Raises:
            TrainingError: for an average of other weights.
        """
        if state.keys() != {*self.average, "steps"}:
            raise TrainingError("the checkpoint's weight average belongs to another head")
        self.steps = int(state["steps"])
        for name, average in self.average.items():
            average.copy_(state[name])
