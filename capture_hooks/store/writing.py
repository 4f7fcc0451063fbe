"""Writing a dump shard by shard, whatever its states come from: resuming, checks, and what it will take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ..errors import StoreError
from .batches import plan_shards
from .checks import check_finite
from .data import Examples
from .manifest import MANIFEST, Dtype, Manifest
from .shard import DTYPES, ShardTensors
from .writer import DumpWriter, check_same

#: A shard's size unless its tokens are given: it is held in memory twice (filled, and being written).
SHARD_BYTES = 256 * 2**20


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


class Writing:
    """Shards from sequences, in their order, until a dump is complete: what every kind of job shares.

    Args:
        manifest: what the finished dump's manifest says, without its shards.
        examples: the data, in memory.
    """

    def __init__(self, manifest: Manifest, examples: Examples) -> None:
        self.manifest = manifest
        self._examples = examples
        self._shards = plan_shards([len(example) for example in examples], manifest.shard_tokens)

    def estimate(self, directory: str | Path) -> Estimate:
        """What it will take to finish the dump in ``directory``; runs the target for a moment.

        Raises:
            StoreError: ``directory`` holds another dump.
        """
        path = Path(directory)
        done = 0
        if (path / MANIFEST).exists():
            found = Manifest.read(path)
            check_same(path, found, self.manifest)
            done = found.tokens
        left = self.manifest.data.tokens - done
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        return Estimate(
            sequences=self.manifest.data.sequences,
            tokens=self.manifest.data.tokens,
            tokens_left=left,
            bytes=self.manifest.data.tokens * self.manifest.row_bytes,
            bytes_left=left * self.manifest.row_bytes,
            bytes_free=shutil.disk_usage(there).free,
            seconds=left * self._seconds_per_token(),
        )

    def run(self, directory: str | Path, on_progress: Callable[[int], None] | None = None) -> Manifest:
        """Write what is missing of the dump in ``directory``; killed at any moment, it can be run again.

        Args:
            directory: a new or empty one, or one where this dump was begun.
            on_progress: called with the tokens done so far, those of an earlier run included.

        Raises:
            StoreError: the directory holds something else, the disk is full, or a state is NaN, infinite or
                too large for the dtype; complete shards stay.
        """
        report = on_progress or (lambda tokens: None)
        with (
            DumpWriter(directory, self.manifest) as writer,
            ThreadPoolExecutor(1, "shard-writer") as background,
            self._open(),
        ):
            done = writer.manifest.tokens
            report(done)
            writing: Future[None] | None = None
            for shard in self._shards[len(writer.manifest.shards) :]:
                tensors = self._allocate(shard)
                for tokens in self._fill(shard, tensors):
                    done += tokens
                    report(done)
                if writing is not None:
                    writing.result()
                writing = background.submit(self._write, writer, shard, tensors)
            if writing is not None:
                writing.result()
        return writer.manifest

    def _allocate(self, shard: range) -> ShardTensors:
        examples = self._examples[shard.start : shard.stop]
        starts = torch.tensor([0, *map(len, examples)]).cumsum(0)
        rows, dtype = int(starts[-1]), DTYPES[self.manifest.dtype]
        apart = self.manifest.target_input is None
        return ShardTensors(
            states=torch.empty(rows, sum(self.manifest.widths), dtype=dtype),
            target=torch.empty(rows, self.manifest.target_width, dtype=dtype) if apart else None,
            token_ids=torch.cat([example.token_ids for example in examples]),
            loss_mask=torch.cat([example.loss_mask for example in examples]),
            argmax=torch.empty(rows, dtype=torch.int64),
            starts=starts,
        )

    def _write(self, writer: DumpWriter, shard: range, tensors: ShardTensors) -> None:
        check_finite(self.manifest, tensors, self._examples[shard.start : shard.stop], shard.start)
        writer.write(tensors)

    def _open(self) -> AbstractContextManager[object]:
        """What is entered around `_fill`."""
        raise NotImplementedError

    def _fill(self, shard: range, tensors: ShardTensors) -> Iterator[int]:
        """Capture one shard into ``tensors``; yields tokens as they are done."""
        raise NotImplementedError

    def _seconds_per_token(self) -> float:
        """From a short trial."""
        raise NotImplementedError


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
