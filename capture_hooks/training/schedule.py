"""Learning rate by progress, where progress is the further of steps and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .config import Schedule


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
