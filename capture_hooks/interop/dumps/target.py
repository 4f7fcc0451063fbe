"""The target model behind a dump: its shape, its fingerprint, its final norm, each read when asked for."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from ...capture.anatomy import Anatomy
from ...capture.fingerprint import TargetFingerprint
from ...errors import StoreError
from ...spec import CaptureSpec
from ...target import checkpoint_fingerprint, final_norm_of, hollow_anatomy
from .contract import Facts


class TargetModel:
    """A target by the path of its checkpoint; what is not asked for is not read.

    Raises:
        ModelError: there is no such model.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def anatomy(self) -> Anatomy:
        """Of the model without its weights."""
        return hollow_anatomy(self.model)

    def fingerprint(self, dtype: str) -> TargetFingerprint:
        """Of the model in the dtype of its states."""
        return checkpoint_fingerprint(self.model, dtype)

    def check(self, facts: Facts, spec: CaptureSpec) -> None:
        """Whether states can be this model's.

        Raises:
            StoreError: they are of another width, or not as many as the points.
            SpecError: a point is not in this model.
        """
        spec.resolve(self.anatomy.n_layers, self.anatomy.split_boundaries)
        if facts.hidden != self.anatomy.hidden_size:
            raise StoreError(
                f"the dump's last hidden state has {facts.hidden} columns, {self.model} a stream of "
                f"{self.anatomy.hidden_size}: it is of another target"
            )
        if facts.slots != len(spec):
            raise StoreError(
                f"{spec} names {len(spec)} points, but the dump's inputs are {facts.width} columns wide, "
                f"{facts.width / facts.hidden:g} times the hidden size"
            )

    @cached_property
    def final_norm(self) -> nn.Module:
        """The norm before ``lm_head``, in float32.

        Raises:
            ModelError: the family has none.
        """
        return final_norm_of(self.model, torch.float32)

    @torch.no_grad()
    def normed(self, last: Tensor) -> Tensor:
        """The final norm of un-normed states [T, H]: computed in float32, rounded once to their dtype."""
        normed: Tensor = self.final_norm(last.float())
        return normed.to(last.dtype)
