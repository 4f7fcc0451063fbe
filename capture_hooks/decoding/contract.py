"""The contract of an engine: another program that runs the target model, here or on many devices.

An engine takes its own settings as the words a user would give it (``--tp-size 2``), unread by us.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from ..spec import CaptureSpec
from ..store.contract import CaptureEngine, SequenceStates

__all__ = [
    "Answer",
    "Asked",
    "CaptureEngine",
    "DecodingEngine",
    "Dialogue",
    "EngineProvider",
    "Generated",
    "GeneratingEngine",
    "Margin",
    "Sampling",
    "SequenceStates",
]


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


#: Scores divided by a smaller temperature may pass float32's largest number.
LEAST_TEMPERATURE: Final = 1e-30


@dataclass(frozen=True, slots=True)
class Sampling:
    """How each next token is chosen, and which tokens end an answer.

    Attributes:
        temperature: 0 for the most probable token.
        top_k: sample among so many of the most probable tokens; None for all.
        top_p: sample among the most probable tokens that hold this much probability; 1 for all.
        min_p: leave out tokens below this share of the best one's probability; 0 for none.
        repetition_penalty: for tokens that were there before, as in transformers; 1 for none.
        ends: token ids that end an answer.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to be answered.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens of the answer, at least one.
        seed: of this answer's sampling, below 2**31.
        known: the answer is there already; an engine counts the prompt in where that decides what runs with
            it, and answers with None.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    known: bool = False


@dataclass(frozen=True, slots=True)
class Generated:
    """What was answered.

    Attributes:
        token_ids: the new tokens, with the one that ended them.
        ended: whether one of the tokens that end an answer did; else there were as many as asked for.
    """

    token_ids: tuple[int, ...]
    ended: bool


class Dialogue(Protocol):
    """Prompts that follow one from another: the answer to one may stand in the next."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to ask, all known."""
        ...

    def asks(self) -> Asked | None:
        """The next prompt, once the last one's answer was taken; None at the end."""
        ...


class GeneratingEngine(Protocol):
    """A running engine that answers many prompts, without a draft head."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, str]:
        """What else may change an answer."""
        ...

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer; None where nothing limits them."""
        ...

    @property
    def at_once(self) -> int:
        """Prompts that are answered at a time."""
        ...

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
        """Answer all dialogues to their ends, several at a time.

        Whoever iterates has taken the answers of one list when asking for the next: only then are their
        dialogues asked again.

        Raises:
            EngineError: a prompt was refused, or the engine is gone.
        """
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
