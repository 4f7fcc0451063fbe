"""The contracts of engines: other programs that run the target model, here or on many devices.

An engine takes its own settings as the words a user would give it (``--tp-size 2``), unread by us.
Its fourth job, to answer many prompts, has its contract in `capture_hooks.decoding.contract`: the model in
this process does that too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ..errors import EngineError
from ..spec import CaptureSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ..decoding.contract import GeneratingEngine, Sampling


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


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to one prompt, greedily.

    Attributes:
        token_ids: the new tokens.
        rounds: passes of the target that gained them, prefill not counted; 0 without speculation.
        accepted: for i = 0, 1, ...: rounds that accepted exactly i drafted tokens; empty where not told.
        seconds: from sending the prompt to the last token.
    """

    token_ids: tuple[int, ...]
    rounds: int
    accepted: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Margin:
    """How sure a greedy choice is.

    Attributes:
        gap: the target's best log-probability minus its second best, one row at a time.
        noise: largest change of one of the best between one row and several rows in a pass.
    """

    gap: float
    noise: float


class DecodingEngine(Protocol):
    """A running engine that answers, with a draft head or without."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings with which the engine decodes, as plain values for a report."""
        ...

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path of a round; 0 without a head."""
        ...

    @property
    def drafted(self) -> int:
        """Drafted tokens verified in a round; 0 without a head."""
        ...

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Answer one prompt greedily."""
        ...

    def margin(self, prompt: Sequence[int], answer: Sequence[int]) -> Margin:
        """How sure the choice of the token behind ``answer`` is, the beginning of this engine's own."""
        ...


@runtime_checkable
class EngineProvider(Protocol):
    """An engine contributed by ``capture_hooks_engines``."""

    @property
    def name(self) -> str:
        """The engine's name, as ``--engine`` takes it."""
        ...

    def capture(
        self, model: Path, spec: CaptureSpec, settings: Sequence[str]
    ) -> AbstractContextManager[CaptureEngine]:
        """Start the engine on ``model`` to capture ``spec``; leaving the context stops it.

        Raises:
            EngineError: the engine is not installed, does not start, or cannot capture this.
        """
        ...

    def decode(
        self, model: Path, head: Path | None, settings: Sequence[str]
    ) -> AbstractContextManager[DecodingEngine]:
        """Start the engine on ``model`` to draft with ``head`` (None: plain greedy decoding).

        Raises:
            EngineError: as `capture`; or the head's witness does not fit what it would be fed.
        """
        ...

    def generate(
        self, model: Path, sampling: Sampling, settings: Sequence[str]
    ) -> AbstractContextManager[GeneratingEngine]:
        """Start the engine on ``model`` to answer many prompts; leaving the context stops it.

        Raises:
            EngineError: the engine is not installed, or does not start.
        """
        ...

    def serve(self, head: Path, model: Path, settings: Sequence[str], start_timeout: float) -> int:
        """Serve ``model`` with ``head`` until interrupted; the exit code.  Called in the main thread.

        Args:
            head: the draft head's directory.
            model: the target's directory, or a name that the engine resolves.
            settings: the user's words for the engine.
            start_timeout: seconds until it must be ready.

        Raises:
            EngineError: as `decode`; or the engine was not ready in time, or ended by itself.
        """
        ...
