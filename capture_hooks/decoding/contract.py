"""What answers many prompts: the model in this process, or an engine.  Prompts in, answers out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

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
class PromptRequest:
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

    def asks(self) -> PromptRequest | None:
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
