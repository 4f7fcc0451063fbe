"""What many answers will take, from a few that are begun and thrown away."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..contract import Asked, Dialogue, Generated, GeneratingEngine

#: Tokens of a trial's answers.
_TRIAL: Final = 24


@dataclass(frozen=True, slots=True)
class Cost:
    """What the answers that are left will take.

    Attributes:
        answers: to write.
        seconds: where they are as long as those in the data; None where it has none.
        tokens: which are so many tokens on average.
        most_seconds: where each has as many as it may.
        tokens_per_second: new ones.
    """

    answers: int
    seconds: float | None
    tokens: float | None
    most_seconds: float
    tokens_per_second: float


def measured(
    engine: GeneratingEngine, asked: Sequence[Asked], answers: int, tokens: float | None, most: int
) -> Cost:
    """Answer a few prompts for a moment.

    Args:
        engine: on the target.
        asked: as many prompts as it answers at a time, or all there are.
        answers: to write.
        tokens: of an answer in the data, None where it has none.
        most: tokens of an answer.

    Raises:
        EngineError: the engine does not answer.
    """
    if not asked:  # no prompt leaves room for an answer
        return Cost(answers, 0.0, tokens, 0.0, 0.0)
    _trial(engine, asked, 2)  # first calls allocate and compile
    first, _ = _trial(engine, asked, 1)
    seconds, came = _trial(engine, asked, _TRIAL)
    # Where some end early, the others decide how long it takes.
    step = max(seconds - first, 1e-9) / max(1, -(-came // len(asked)) - 1)
    rounds = max(1.0, answers / len(asked))

    def seconds_of(length: float) -> float:
        return rounds * (first + (length - 1) * step)

    return Cost(
        answers=answers,
        seconds=None if tokens is None else seconds_of(tokens),
        tokens=tokens,
        most_seconds=seconds_of(most),
        tokens_per_second=rounds * len(asked) * most / seconds_of(most),
    )


class _Once:
    """One prompt that is asked and not followed by another."""

    finished = False

    def __init__(self, asked: Asked) -> None:
        self._asked: Asked | None = asked

    def asks(self) -> Asked | None:
        asked, self._asked = self._asked, None
        return asked


def _trial(engine: GeneratingEngine, asked: Sequence[Asked], tokens: int) -> tuple[float, int]:
    """Seconds for so many new tokens of each prompt, and how many came of all."""
    once: list[Dialogue] = [
        _Once(Asked(one.prompt, min(tokens, one.max_new_tokens), one.seed)) for one in asked
    ]
    came = 0
    started = time.perf_counter()
    for group in engine.answers(once):
        came += sum(len(answer.token_ids) for _, answer in group if isinstance(answer, Generated))
    return time.perf_counter() - started, came
