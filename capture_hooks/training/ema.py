"""An exponential moving average of the trained weights: smoother than the last step's, and often better."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import TrainingError


class WeightAverage:
    """Averages the trained parameters of a module with ``decay``, faster in the first steps.

    Step t uses ``min(decay, (1 + t) / (10 + t))``, so that a short run does not average its random start.
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
        """The module computes with the average inside the block."""
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
