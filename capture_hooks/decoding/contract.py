"""The contract of an engine: another program that runs the target model, here or on many devices.

An engine takes its own settings as the words a user would give it (``--tp-size 2``), unread by us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ..spec import CaptureSpec
from ..store.contract import CaptureEngine, SequenceStates

__all__ = ["Answer", "CaptureEngine", "DecodingEngine", "EngineProvider", "Margin", "SequenceStates"]


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
        """How it decodes."""
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
        """What ``--engine`` takes."""
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
