"""Many prompts to a server at a time: enough to keep it busy, few enough to bound memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from ..decoding.contract import Dialogue, Generated, PromptRequest

#: Most sequences under way at a time, and how many full batches of tokens.
IN_FLIGHT: Final = 128
BATCHES: Final = 3
#: Dialogues under way at a time: an engine that decodes fewer together lets the others wait.
DIALOGUES: Final = 256

_T = TypeVar("_T")


def in_flight(
    run: Callable[[int, Sequence[int]], _T], sequences: Sequence[Sequence[int]], batch_tokens: int
) -> Iterator[tuple[int, _T]]:
    """Run every sequence, several at a time, in threads; number and result as each becomes ready.

    Args:
        run: given a sequence's number and tokens.
        sequences: token ids; one longer than the room runs by itself.
        batch_tokens: most tokens in one of the server's forward passes.

    Raises:
        Exception: what ``run`` raised; sequences that have not begun are left out then.
    """
    room = BATCHES * batch_tokens
    # Not a context: leaving that would wait for every prompt under way, also after an interrupt.
    pool = ThreadPoolExecutor(IN_FLIGHT, "capture-hooks-prompt")
    under_way: dict[Future[_T], int] = {}
    waiting = enumerate(sequences)
    following = next(waiting, None)
    try:
        while following is not None or under_way:
            tokens = sum(len(sequences[number]) for number in under_way.values())
            while following is not None and len(under_way) < IN_FLIGHT:
                if under_way and tokens + len(following[1]) > room:
                    break
                tokens += len(following[1])
                under_way[pool.submit(run, *following)] = following[0]
                following = next(waiting, None)
            for done in wait(under_way, return_when=FIRST_COMPLETED).done:
                number = under_way.pop(done)
                yield number, done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def converse(
    ask: Callable[[PromptRequest], Generated], dialogues: Iterable[Dialogue]
) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
    """Dialogues with a server that batches by itself; see `GeneratingEngine.answers`.

    Args:
        ask: run in threads; dialogues are asked in the caller's.
        dialogues: begun as others end.

    Raises:
        Exception: what ``ask`` raised; prompts that have not begun are left out then.
    """
    # Not a context, as above.
    pool = ThreadPoolExecutor(DIALOGUES, "capture-hooks-prompt")
    under_way: dict[Future[Generated], Dialogue] = {}
    waiting = (dialogue for dialogue in dialogues if not dialogue.finished)
    more = True
    try:
        while more or under_way:
            while more and len(under_way) < DIALOGUES:
                if (dialogue := next(waiting, None)) is None:
                    more = False
                else:
                    yield from _advance(dialogue, ask, pool, under_way)
            done = wait(under_way, return_when=FIRST_COMPLETED).done if under_way else set()
            ready: list[tuple[Dialogue, Generated | None]]
            ready = [(under_way.pop(future), future.result()) for future in done]
            if ready:
                yield ready
            for dialogue, _ in ready:
                yield from _advance(dialogue, ask, pool, under_way)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _advance(
    dialogue: Dialogue,
    ask: Callable[[PromptRequest], Generated],
    pool: ThreadPoolExecutor,
    under_way: dict[Future[Generated], Dialogue],
) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
    """Send its next prompt; those whose answers are known are handed out on the way."""
    while (asked := dialogue.asks()) is not None:
        if not asked.known:
            under_way[pool.submit(ask, asked)] = dialogue
            return
        yield [(dialogue, None)]
