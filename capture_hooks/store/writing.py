"""Writing a dump, whatever its states come from: resuming, checks, and what it will take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from ..errors import StoreError
from .data import Example, Examples
from .dump import DumpWriter, check_same, plan_shards
from .manifest import MANIFEST, Dtype, Manifest
from .shard import DTYPES, ShardTensors, all_finite

#: A shard's size unless its tokens are given: it is held in memory twice (filled, and being written).
SHARD_BYTES = 256 * 2**20


class StateSource(Protocol):
    """Where a dump's states come from: `ModelStates`, or an engine."""

    @property
    def manifest(self) -> Manifest:
        """What the finished dump says of itself, without its shards."""
        ...

    @property
    def examples(self) -> Examples:
        """The data, in memory."""
        ...

    def opened(self) -> AbstractContextManager[object]:
        """Entered around all calls of `fill` of one dump."""
        ...

    def fill(self, shard: range, tensors: ShardTensors) -> Iterator[int]:
        """Put the states of the sequences ``shard`` into ``tensors``; yields tokens as they are done.

        Shards come in order, without gaps; a resumed dump begins behind those that are there.
        """
        ...

    def seconds_per_token(self) -> float:
        """Estimated seconds for each token, from a short trial."""
        ...


def write_dump(
    source: StateSource, directory: str | Path, on_progress: Callable[[int], None] | None = None
) -> Manifest:
    """Write what is missing of the dump in ``directory``; killed at any moment, it can be run again.

    Args:
        source: of the states; it knows the data and what the dump is to be.
        directory: a new or empty one, or one where this dump was begun.
        on_progress: called with the tokens done so far, those of an earlier run included.

    Raises:
        StoreError: the directory holds something else, the disk is full, or a state is NaN, infinite or
            too large for the dtype; complete shards stay.
    """
    report = on_progress or (lambda tokens: None)
    examples = source.examples

    def finish(writer: DumpWriter, shard: range, tensors: ShardTensors) -> None:
        _check_finite(source.manifest, tensors, examples[shard.start : shard.stop], shard.start)
        writer.write(tensors)

    with (
        DumpWriter(directory, source.manifest) as writer,
        ThreadPoolExecutor(1, "shard-writer") as background,
        source.opened(),
    ):
        done = writer.manifest.tokens
        report(done)
        writing: Future[None] | None = None
        shards = plan_shards([len(example) for example in examples], source.manifest.shard_tokens)
        for shard in shards[len(writer.manifest.shards) :]:
            tensors = _allocated(source.manifest, examples[shard.start : shard.stop])
            for tokens in source.fill(shard, tensors):
                done += tokens
                report(done)
            if writing is not None:
                writing.result()
            writing = background.submit(finish, writer, shard, tensors)
        if writing is not None:
            writing.result()
    return writer.manifest


@dataclass(frozen=True, slots=True)
class Estimate:
    """What finishing a dump will take.

    Attributes:
        sequences, tokens: all of them; ``tokens_left`` are still to do.
        bytes: of the finished dump; ``bytes_left`` are still to be written, ``bytes_free`` are on the disk.
        seconds: time for what is left, from a short trial on this machine.
    """

    sequences: int
    tokens: int
    tokens_left: int
    bytes: int
    bytes_left: int
    bytes_free: int
    seconds: float


def estimate(source: StateSource, directory: str | Path) -> Estimate:
    """What it will take to finish the dump in ``directory``; runs the target for a moment.

    Raises:
        StoreError: ``directory`` holds another dump.
    """
    path, manifest = Path(directory), source.manifest
    done = 0
    if (path / MANIFEST).exists():
        found = Manifest.read(path)
        check_same(path, found, manifest)
        done = found.tokens
    left = manifest.data.tokens - done
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return Estimate(
        sequences=manifest.data.sequences,
        tokens=manifest.data.tokens,
        tokens_left=left,
        bytes=manifest.data.tokens * manifest.row_bytes,
        bytes_left=left * manifest.row_bytes,
        bytes_free=shutil.disk_usage(there).free,
        seconds=left * source.seconds_per_token(),
    )


def _allocated(manifest: Manifest, examples: Sequence[Example]) -> ShardTensors:
    """A shard's tensors: tokens and masks are there, states are to be filled in."""
    starts = torch.tensor([0, *map(len, examples)]).cumsum(0)
    rows, dtype = int(starts[-1]), DTYPES[manifest.dtype]
    apart = manifest.target_input is None
    return ShardTensors(
        states=torch.empty(rows, sum(manifest.widths), dtype=dtype),
        target=torch.empty(rows, manifest.target_width, dtype=dtype) if apart else None,
        token_ids=torch.cat([example.token_ids for example in examples]),
        loss_mask=torch.cat([example.loss_mask for example in examples]),
        argmax=torch.empty(rows, dtype=torch.int64),
        starts=starts,
    )


def _check_finite(manifest: Manifest, shard: ShardTensors, examples: Sequence[Example], first: int) -> None:
    """Whether every state of a shard is a number.

    Args:
        manifest: of the dump.
        shard: its tensors, already in the dump's dtype.
        examples: its sequences.
        first: index of the first of them in the data.

    Raises:
        StoreError: naming the shallowest such point, the conversation and the position.
    """
    if all_finite(shard.states) and (shard.target is None or all_finite(shard.target)):
        return
    for point, states in _points(manifest, shard):
        if all_finite(states):
            continue
        finite = torch.isfinite(states)
        row, column = (~finite).nonzero()[0].tolist()
        within = int(torch.searchsorted(shard.starts, row, right=True)) - 1
        value = float(states[row, column])
        advice = "check the model's weights and dtype"
        if manifest.dtype == "float16" and value == value:
            advice = "float16 ends at 65504: dump in bfloat16 or float32 (--dtype)"
        raise StoreError(
            f"{point} is {value} in {manifest.dtype} in conversation {first + within} "
            f"({examples[within].source}) at position {row - int(shard.starts[within])}, "
            f"column {column}; {advice}"
        )


def _points(manifest: Manifest, shard: ShardTensors) -> list[tuple[str, Tensor]]:
    """Each point's states, the shallowest first: attention spreads a NaN over all rows of deeper ones."""
    spec = manifest.spec.resolve(manifest.n_layers, manifest.split_boundaries)
    inputs = zip(spec.inputs, manifest.spec.inputs, manifest.columns, strict=True)
    ordered = sorted(
        inputs, key=lambda item: manifest.n_layers if item[0].boundary is None else item[0].boundary
    )
    found = [(str(point), shard.states[:, first:last]) for _, point, (first, last) in ordered]
    if shard.target is not None:
        found.append((f"target {manifest.spec.target}", shard.target))
    return found


def with_shards_of(manifest: Manifest, shard_tokens: int | None) -> Manifest:
    """``manifest`` with shards of that many tokens; None for shards of about `SHARD_BYTES`."""
    if shard_tokens is None:
        shard_tokens = max(1, SHARD_BYTES // manifest.row_bytes)
    return manifest.model_copy(update={"shard_tokens": shard_tokens})


def stored_dtype(dtype: str) -> Dtype:
    """``dtype`` where states can be stored as it.

    Raises:
        StoreError: they cannot.
    """
    if dtype not in DTYPES:
        raise StoreError(f"states cannot be stored as {dtype}; choose a dtype of {', '.join(DTYPES)}")
    return cast(Dtype, dtype)
