"""Which sequences make up which batch: a token budget per optimiser step, for any number of processes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Final

import torch
from torch.utils.data import Sampler

#: Sequences looked at for one that still fits into a batch.
_LOOK_AHEAD: Final = 64


def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The order of ``size`` sequences in one pass; a function of seed and epoch alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(size, generator=generator).tolist()


def global_batches(lengths: Sequence[int], budget: int, seed: int, at_least: int = 1) -> Iterator[list[int]]:
    """Endless batches of sequence numbers, pass after pass, each batch within ``budget`` tokens.

    Every pass visits each sequence once.  A batch takes what the one before had to leave out, then the
    pass's order, skipping what does not fit until a few dozen wait.  One holds at least ``at_least``
    sequences, so that no process is left without work; only for that may it exceed the budget.
    """
    order = (item for epoch in count() for item in shuffled(len(lengths), seed, epoch))
    waiting: list[int] = []
    while True:
        batch: list[int] = []
        left: list[int] = []
        used = 0
        offered = deque(waiting)
        while offered or len(left) < _LOOK_AHEAD:
            item = offered.popleft() if offered else next(order)
            if used + lengths[item] <= budget or len(batch) < at_least:
                batch.append(item)
                used += lengths[item]
            else:
                left.append(item)
        waiting = left
        yield batch


def split(batch: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Divide a batch into ``parts`` of like size: longest first, onto the emptiest; none stays empty."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    load = [(0, 0, part) for part in range(parts)]  # tokens, sequences, part
    for item in sorted(batch, key=lambda i: (-lengths[i], i)):
        tokens, sequences, part = heapq.heappop(load)
        shares[part].append(item)
        heapq.heappush(load, (tokens + lengths[item], sequences + 1, part))
    return shares


class TokenBudgetSampler(Sampler[list[int]]):
    """This process's forward passes, ``accumulate`` for each of ``steps`` optimiser steps.

    The whole run is one endless stream, so resuming is skipping: the sampler has no state of its own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        budget: int,
        *,
        steps: int,
        seed: int,
        accumulate: int = 1,
        processes: int = 1,
        process: int = 0,
    ) -> None:
        self.lengths, self.budget, self.steps, self.seed = lengths, budget, steps, seed
        self.accumulate, self.processes, self.process = accumulate, processes, process

    def __iter__(self) -> Iterator[list[int]]:
        parts = self.accumulate * self.processes
        batches = global_batches(self.lengths, self.budget, self.seed, at_least=parts)
        for batch in islice(batches, self.steps):
            yield from split(batch, self.lengths, parts)[self.process :: self.processes]

    def __len__(self) -> int:
        return self.steps * self.accumulate


def steps_for(
    lengths: Sequence[int], budget: int, seed: int, epochs: float, at_least: int = 1, most: int | None = None
) -> int:
    """Optimiser steps after which ``epochs`` passes' worth of sequences have been seen; ``most`` at most."""
    wanted, seen = epochs * len(lengths), 0
    for steps, batch in enumerate(global_batches(lengths, budget, seed, at_least), start=1):
        seen += len(batch)
        if seen >= wanted or steps == most:
            return steps
    raise AssertionError("the stream of batches is endless")


def in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Batches of neighbours, each within ``budget`` tokens where a single sequence allows it."""
    batches: list[list[int]] = []
    used = budget + 1
    for item, size in enumerate(lengths):
        if used + size > budget:
            batches.append([])
            used = 0
        batches[-1].append(item)
        used += size
    return batches
