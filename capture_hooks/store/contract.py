"""The contract of an engine that runs the target and gives states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import EngineError


@dataclass(frozen=True, slots=True, eq=False)
class SequenceStates:
    """What an engine captured of one sequence of T tokens.

    Attributes:
        number: which of the sequences that were asked for.
        inputs: [T, W] the spec's inputs, packed in its order.
        target: [T, H] the spec's target point.
        argmax: [T] int64 the target's greedy next token after each.
    """

    number: int
    inputs: Tensor
    target: Tensor
    argmax: Tensor


class SequenceError(EngineError):
    """The states of one of the sequences that were asked for did not come."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"sequence {number}: {why}")
        self.number, self.why = number, why


class CaptureEngine(Protocol):
    """A running engine that captures one spec."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, str]:
        """What else changes the bits."""
        ...

    @property
    def batch_tokens(self) -> int:
        """Most tokens in one forward pass."""
        ...

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[SequenceStates]:
        """Prefill every sequence; its states as they become ready, in any order.

        Raises:
            SequenceError: a sequence that the engine refused, or whose rows are not as many as its tokens.
            EngineError: the engine broke off.
        """
        ...
