"""What a draft head is: it takes captured states as input, computes its training loss, and drafts.

Shapes: N tokens of S sequences packed end to end, K captured points, H the target's width,
D the draft vocabulary, V the target's vocabulary, J draft positions: behind row t, position j holds the token
x[t+2+j] (in EAGLE-3 a step of training-time test).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..capture.anatomy import Anatomy
from ..spec import CaptureSpec
from .drafting import Drafter, Drafting
from .schema import HeadSchema


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Sequences packed without padding; rows of different sequences never see each other.

    Attributes:
        states: [N, K*H] captured inputs, columns in spec order.
        target: [N, H] state at the spec's target point (``final_norm`` unless stated).
        token_ids: [N] int64; row t holds token x[t], and ``states[t]`` was captured at it.
        loss_mask: [N] bool; whether token x[t] is one the head should learn to predict.
        starts: [S+1] int64 offsets of the sequences, ``starts[0] == 0``, ``starts[-1] == N``.
        argmax: [N] int64, the target's greedy next token after row t over its full vocabulary;
            None where it was not captured (the head then computes it in chunks).
    """

    states: Tensor
    target: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    starts: Tensor
    argmax: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over rows for each draft position, teacher-forced, so that any number of processes can add up.

    Attributes:
        loss: [J] differentiable sum of weighted cross-entropies.
        weight: [J] sum of the weights.
        hits: [J] rows (weighted) whose draft arg-max is the target's greedy token.
        rows: [J] rows that count towards ``hits`` (those the mask selects, whether or not the
            target's greedy token lies inside the draft vocabulary).
        factors: [J] the factor of each position in the objective.
    """

    loss: Tensor
    weight: Tensor
    hits: Tensor
    rows: Tensor
    factors: Tensor

    def mean(self, normaliser: Tensor | float | None = None) -> Tensor:
        """The scalar objective: factor-weighted sum of ``loss`` over ``normaliser``.

        ``normaliser`` defaults to this batch's own weight at position 0; a trainer passes the global one.
        """
        total = self.weight[0].clamp(min=1) if normaliser is None else normaliser
        return (self.factors * self.loss).sum() / total


@dataclass(frozen=True, slots=True)
class TargetReadout:
    """How target states become logits: ``softcap(scale * (norm(x) @ weight.T + bias))``."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    norm: nn.Module | None = None  # applied first when the target point is the un-normed end of the stream

    def logits(self, states: Tensor, rows: Tensor | None = None) -> Tensor:
        """Logits [..., V] of states [..., H], or only the vocabulary ``rows`` [D] of them."""
        weight = self.weight if rows is None else self.weight[rows]
        bias = self.bias if rows is None or self.bias is None else self.bias[rows]
        x = states if self.norm is None else self.norm(states)
        out = nn.functional.linear(x.to(weight.dtype), weight, bias)
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out


class DraftHead(nn.Module, ABC):
    """A draft head.  Subclasses hold a frozen view of the target's embedding and output rows.

    Training calls the module itself; decoding asks the `drafter` of each sequence for proposals.
    """

    #: The provider's name; written into the checkpoint.
    name: ClassVar[str]
    #: Names of parameters with a row for each token: Muon, which is for maps, leaves them to AdamW.
    token_tables: ClassVar[frozenset[str]] = frozenset()
    #: The states this head takes as input, layers absolute (non-negative).
    spec: CaptureSpec
    #: Decoder layers of the target.
    target_layers: int

    @abstractmethod
    def forward(self, batch: TrainBatch) -> StepSums:
        """The objective's sums over ``batch``."""

    def calibrate(self, states: Tensor) -> None:  # optional: most heads have nothing to set
        """See a sample of captured states [T, K*H] once, before training begins (restored heads too)."""

    @abstractmethod
    def drafter(self, max_length: int, drafting: Drafting) -> Drafter:
        """Draft a sequence of up to ``max_length`` tokens, drafted ones too, with the weights as they are."""

    @property
    @abstractmethod
    def draft_token_ids(self) -> Tensor:
        """[D] int64 ascending: the target ids the head can draft."""

    @abstractmethod
    def export(self, order: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors in the field's names and the head's ``config.json`` fields.

        Input ``order[i]`` of the spec becomes input i of the file: per-input columns and norms move along.
        """


@runtime_checkable
class HeadProvider(Protocol):
    """Makes and loads heads of one kind; contributed by ``capture_hooks_heads``."""

    @property
    def name(self) -> str: ...

    @property
    def config_type(self) -> type:
        """The frozen dataclass of this head's settings."""
        ...

    @property
    def schema(self) -> HeadSchema:
        """What this head's file holds."""
        ...

    def create(
        self,
        config: Any,
        spec: CaptureSpec,
        anatomy: Anatomy,
        readout: TargetReadout,
        draft_token_ids: Tensor,
    ) -> DraftHead:
        """A fresh head for a target."""
        ...

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        spec: CaptureSpec,
        order: Sequence[int],
        anatomy: Anatomy,
        readout: TargetReadout,
    ) -> DraftHead:
        """The head that `DraftHead.export` wrote with ``order``.

        Raises:
            HeadError: for missing, misshapen or contradictory tensors and fields.
        """
        ...
