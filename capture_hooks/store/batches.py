"""Which sequences share a shard, and which share a forward pass.

Both depend on the lengths, the two limits and the model's rule alone, never on where a run was interrupted:
a resumed run makes the same batches, so the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def plan_shards(lengths: Sequence[int], shard_tokens: int) -> list[range]:
    """Which sequences go into which shard: in order, a shard closing before it would exceed ``shard_tokens``.

    A sequence longer than ``shard_tokens`` has a shard to itself.
    """
    shards, start, filled = [], 0, 0
    for index, length in enumerate(lengths):
        if filled and filled + length > shard_tokens:
            shards.append(range(start, index))
            start, filled = index, 0
        filled += length
    if start < len(lengths):
        shards.append(range(start, len(lengths)))
    return shards


def plan_batches(
    lengths: Sequence[int],
    shard: Iterable[int],
    batch_tokens: int,
    alike: Callable[[int, int], bool] = lambda one, other: True,
) -> list[list[int]]:
    """The sequences of one shard, longest first, in batches of at most ``batch_tokens`` with their padding.

    Sequences of like length share a batch, so little is padded.  A sequence longer than ``batch_tokens``
    has a batch to itself.  Sequences whose lengths are not ``alike`` (`LengthRule.alike`) never share one.
    """
    batches: list[list[int]] = []
    for index in sorted(shard, key=lambda i: (-lengths[i], i)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= batch_tokens and alike(lengths[index], longest):
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
