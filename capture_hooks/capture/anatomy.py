"""What a binding must know about a model, and the contract of those who find it out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, runtime_checkable

from torch import Tensor, nn


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class LengthRule:
    """How the rows of one forward depend on its length, apart from what attention sees.

    Attributes:
        switches: numbers of positions; a forward that reaches beyond one computes all its rows otherwise
            than a shorter one does (LongRoPE's original context).
        separate: a forward that reaches beyond this many positions must hold one sequence, or one more token
            of it, alone (dynamic NTK scaling); None where there is no such number.
        forget: makes the model forget the longest sequence it has seen; called before a new one.
    """

    switches: frozenset[int] = frozenset()
    separate: int | None = None
    forget: Callable[[], None] = _nothing

    def alike(self, one: int, other: int) -> bool:
        """Whether a sequence of one length may share a forward with, or be padded to, the other."""
        longest = max(one, other)
        if self.separate is not None and longest > self.separate:
            return False
        return not any(min(one, other) <= switch < longest for switch in self.switches)

    def most_rows(self, past: int) -> int | None:
        """Rows that may follow ``past`` cached ones in one forward as if each came alone; None for any."""
        if self.separate is not None and past >= self.separate:
            return 1
        ends = [end - past for end in (*self.switches, self.separate) if end is not None and end > past]
        return min(ends, default=None)


Layout = Literal["plain", "pair", "stream"]


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which token of which request each row of one forward is, where requests are packed into one axis.

    Request r gives the next ``lengths[r]`` rows: its tokens ``starts[r]``, ``starts[r] + 1``, …  Rows behind
    the last request are padding.

    Attributes:
        requests: one key per request, the same in all forwards of a request.
        lengths: rows of each request.
        starts: position of each request's first row; a tensor is looked at only when rows are read.
        unknown: why rows cannot be told, or None.
    """

    requests: tuple[Hashable, ...]
    lengths: tuple[int, ...]
    starts: Sequence[int] | Tensor
    unknown: str | None = None

    @classmethod
    def untold(cls, why: str) -> Self:
        """Rows whose requests are not known: an error for a session that must tell them apart."""
        return cls((), (), (), why)


#: From ``(args, kwargs)`` of the decoder's forward to its rows; must not wait for the device.
RowReader = Callable[[tuple[Any, ...], dict[str, Any]], BatchRows]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of one decoder-only language model, wrappers peeled.

    Attributes:
        model: the module that maps token ids to logits.
        decoder: the module whose forward runs the layers (``model.model`` in most families).
        decoder_name: its qualified name inside ``model`` (empty when they are the same).
        layers: the decoder layers in order of execution; boundary k enters ``layers[k]``.
        layer_names: their qualified names inside ``model``.
        embedding: the token embedding.
        final_norm: the norm between boundary n and ``lm_head``; None where the family has none.
        final_norm_name: its qualified name.
        final_norm_call: where the model calls that module several times in one forward (NanoChat norms the
            embedding with it too), which call is the final norm, from 0; None where there is one call.
        lm_head: the projection to the vocabulary.
        hidden_size: width of the residual stream.
        vocab_size: rows of ``lm_head``.
        layout: how a layer hands on the stream: *plain* (its output is the stream), *pair*
            (``(hidden, residual)`` to be summed), *stream* (the residual lives on the batch).
        split_boundaries: boundaries k where the model adds something between layers.
        logit_scale: factor on ``lm_head``'s output (Cohere, Granite); 1 where there is none.
        logit_softcap: ``cap * tanh(logits / cap)`` after scaling (Gemma 2); None where there is none.
        readout_gap: why logits are not ``softcap(scale * lm_head(final_norm))``, as a clause for an error
            message (OPT-350m projects in between); None where they are.
        rows: tells whose token each row is, for engines that pack the requests of a batch into one axis; None
            where a forward runs over ``[batch, tokens]`` and a KV cache object follows the requests.
        lengths: which sequences may share a forward, where that depends on their lengths.
    """

    model: nn.Module
    decoder: nn.Module
    decoder_name: str
    layers: tuple[nn.Module, ...]
    layer_names: tuple[str, ...]
    embedding: nn.Module
    final_norm: nn.Module | None
    final_norm_name: str | None
    lm_head: nn.Module
    hidden_size: int
    vocab_size: int
    layout: Layout = "plain"
    split_boundaries: frozenset[int] = frozenset()
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    readout_gap: str | None = None
    rows: RowReader | None = None
    lengths: LengthRule = field(default_factory=LengthRule)
    final_norm_call: int | None = None

    @property
    def n_layers(self) -> int:
        return len(self.layers)


@runtime_checkable
class AnatomyProvider(Protocol):
    """Finds the `Anatomy` of one library's models; contributed by ``capture_hooks_anatomies``."""

    @property
    def name(self) -> str:
        """Unique among installed providers."""
        ...

    def match(self, model: nn.Module) -> int:
        """How specifically this provider knows ``model`` (already peeled); 0 means not at all."""
        ...

    def describe(self, model: nn.Module) -> Anatomy:
        """Find the parts.

        Raises:
            BindError: naming what was looked for and what was found instead.
        """
        ...

    def unwrap(self, model: nn.Module) -> Sequence[nn.Module]:
        """Modules directly inside a wrapper this library adds (empty when ``model`` is no wrapper)."""
        ...
