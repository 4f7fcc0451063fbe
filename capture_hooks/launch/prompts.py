"""Many prompts to a server at a time: enough that it never waits, few enough to bound what is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final, TypeVar

#: Most sequences under way at a time, and how many full batches of tokens.
IN_FLIGHT: Final = 128
BATCHES: Final = 3

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
    with ThreadPoolExecutor(IN_FLIGHT, "capture-hooks-prompt") as pool:
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
