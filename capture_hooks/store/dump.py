"""A dump on disk: read through memory maps, and written shard by shard.

A kill at any moment loses at most the shard being written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import torch
from torch import Tensor

from ..capture.fingerprint import TargetFingerprint
from ..errors import StoreError
from ..io import LOCK, UNFINISHED, locked, refused
from ..spec import CaptureSpec
from .manifest import MANIFEST, Manifest, ShardRecord
from .shard import DTYPES, ShardTensors, StoredSequence, check_file, columns_of, map_shard, write_shard


class Dump(Sequence[StoredSequence]):
    """A dump opened for reading; `open` makes one.  Item i is the i-th sequence of the data."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._shards: list[ShardTensors | None] = [None] * len(manifest.shards)
        self._ends = list(accumulate(shard.sequences for shard in manifest.shards))

    @classmethod
    def open(
        cls,
        directory: str | Path,
        spec: CaptureSpec | None = None,
        fingerprint: TargetFingerprint | None = None,
        *,
        verify: bool = False,
        partial: bool = False,
    ) -> Self:
        """Open a dump; reads the manifest and looks at the sizes of the shards, not at their contents.

        Args:
            directory: where `DumpWriter` wrote.
            spec: what the reader will feed its head; must name the stored states in the stored order.
            fingerprint: the target the reader works with; its weights must be those of the dump's target,
                or the same in another precision.
            verify: read every shard and compare its checksum.
            partial: take what is there of a dump that is not finished.

        Raises:
            StoreError: the directory is damaged, unfinished, no dump, or disagrees with the request;
                the message names both values.
            SpecError: ``spec`` names a layer that the dump's target does not have.
        """
        path = Path(directory)
        manifest = Manifest.read(path)
        problems = manifest.spec_disagreements(spec) if spec is not None else []
        if fingerprint is not None and not manifest.fingerprint.same_weights(fingerprint):
            problems += [f"target model: {text}" for text in manifest.fingerprint.differences(fingerprint)]
        if problems:
            raise StoreError(f"{path} disagrees with the request ('here' is the dump): {'; '.join(problems)}")
        if not manifest.complete and not partial:
            raise StoreError(
                f"{path} is not finished ({manifest.sequences} of {manifest.data.sequences} sequences); "
                "run the same dump command again to finish it"
            )
        for record in manifest.shards:
            check_file(path / record.file, record.bytes, record.sha256 if verify else None)
        return cls(path, manifest)

    def __reduce__(self) -> tuple[Any, ...]:
        # A data loader's worker maps the files itself instead of receiving copies.
        return type(self), (self.directory, self.manifest)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, from the manifest."""
        return self.manifest.lengths

    def sequence(self, index: int) -> StoredSequence:
        """The sequence at ``index``, as views into the shard's memory map.

        Raises:
            IndexError: no such sequence.
            StoreError: the shard is damaged.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of a dump of {len(self)}")
        index %= len(self)
        at = bisect_right(self._ends, index)
        shard = self._shard(at)
        within = index - (self._ends[at - 1] if at else 0)
        start, end = shard.starts[within : within + 2].tolist()
        return self._sequence(shard, slice(start, end))

    @overload
    def __getitem__(self, index: int) -> StoredSequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredSequence]: ...
    def __getitem__(self, index: int | slice) -> StoredSequence | list[StoredSequence]:
        if isinstance(index, slice):
            return [self.sequence(i) for i in range(len(self))[index]]
        return self.sequence(index)

    def __iter__(self) -> Iterator[StoredSequence]:
        return map(self.sequence, range(len(self)))

    def token_counts(self, vocab_size: int) -> Tensor:
        """[V] int64: how often each token occurs where ``loss_mask`` selects it.

        Raises:
            StoreError: a stored token lies outside ``vocab_size``.
        """
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for at, record in enumerate(self.manifest.shards):
            shard = self._shard(at)
            wanted = shard.token_ids[shard.loss_mask]
            if wanted.numel() and int(wanted.max()) >= vocab_size:
                raise StoreError(
                    f"{self.directory / record.file} holds token {int(wanted.max())}, "
                    f"outside a vocabulary of {vocab_size}"
                )
            counts += torch.bincount(wanted, minlength=vocab_size)
        return counts

    def _shard(self, at: int) -> ShardTensors:
        shard = self._shards[at]
        if shard is None:
            path = self.directory / self.manifest.shards[at].file
            shard = self._shards[at] = map_shard(path)
            _check_tensors(path, shard, self.manifest, self.manifest.shards[at].lengths)
        return shard

    def _sequence(self, shard: ShardTensors, rows: slice) -> StoredSequence:
        states = shard.states[rows]
        if shard.target is not None:
            target = shard.target[rows]
        else:
            assert self.manifest.target_input is not None
            first, last = self.manifest.columns[self.manifest.target_input]
            target = states[:, first:last]
        return StoredSequence(
            states,
            target,
            shard.token_ids[rows],
            shard.loss_mask[rows],
            None if shard.argmax is None else shard.argmax[rows],
        )


def _check_tensors(path: Path, shard: ShardTensors, manifest: Manifest, lengths: tuple[int, ...]) -> None:
    """Whether a shard is what the manifest says; looks at shapes and offsets only."""
    rows = sum(lengths)
    states = DTYPES[manifest.dtype]
    expected = {
        "states": ((rows, sum(manifest.widths)), states),
        "target": ((rows, manifest.target_width), states),
        "token_ids": ((rows,), torch.int64),
        "loss_mask": ((rows,), torch.bool),
        "argmax": ((rows,), torch.int64),
        "starts": ((len(lengths) + 1,), torch.int64),
    }
    for name, shape_and_dtype in expected.items():
        tensor = getattr(shard, name)
        wanted = None if name in manifest.absent else shape_and_dtype
        found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
        if found != wanted:
            raise StoreError(f"{path} is damaged: {name} is {found}, the manifest says {wanted}")
    if shard.lengths != lengths or int(shard.starts[0]) != 0:
        raise StoreError(f"{path} is damaged: its sequence lengths are not those of the manifest")


class DumpWriter:
    """Creates a dump, or goes on with one that was begun with the same manifest.

    Each call of `write` makes one shard; ``manifest.sequences`` says how many sequences are there already.
    How sequences fall into shards is `plan_shards`'s business and must not depend on where a run was killed.

    ::

        with DumpWriter(directory, manifest) as writer:
            for shard in plan_shards(lengths, manifest.shard_tokens)[len(writer.manifest.shards) :]:
                writer.write([make(i) for i in shard])

    Raises:
        StoreError: the directory holds something else, a dump of another spec, model, data or dtype
            (naming both values), is being written by another process, or cannot be written.
    """

    def __init__(self, directory: str | Path, manifest: Manifest) -> None:
        self.directory = Path(directory)
        self.manifest = manifest
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise refused(error, self.directory) from error
        with ExitStack() as stack:
            stack.enter_context(locked(self.directory))
            self._begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, shard: ShardTensors | Sequence[StoredSequence], *, finite: bool = False) -> None:
        """Write the next shard and enter it into the manifest; both are on disk when this returns.

        Args:
            shard: its tensors, or its sequences, which are gathered as they are written.
            finite: look at every state on the way.

        Raises:
            StoreError: the system refused; the shards before this one are intact.
            NotFiniteError: a state is NaN or infinite; the shards before this one are intact.
        """
        if isinstance(shard, ShardTensors):
            columns, lengths = shard.columns(), shard.lengths
        else:
            columns, lengths = columns_of(shard, self.manifest.absent), tuple(map(len, shard))
        name = f"shard-{len(self.manifest.shards):05d}.safetensors"
        digest, size = write_shard(self.directory / name, columns, finite=finite)
        record = ShardRecord(
            file=name, sha256=digest, bytes=size, sequences=len(lengths), tokens=sum(lengths), lengths=lengths
        )
        manifest = self.manifest.model_copy(update={"shards": (*self.manifest.shards, record)})
        manifest.write(self.directory)
        self.manifest = manifest

    def _begin(self) -> None:
        there = {path.name for path in self.directory.iterdir()} - {LOCK}
        for name in [name for name in there if name.endswith(UNFINISHED)]:
            (self.directory / name).unlink()
            there.discard(name)
        if MANIFEST in there:
            found = Manifest.read(self.directory)
            check_same(self.directory, found, self.manifest)
            for record in found.shards:
                check_file(self.directory / record.file, record.bytes)
            self.manifest = found
        elif there:
            raise StoreError(
                f"{self.directory} is not a dump, nor empty (it holds {min(there)}); give another directory"
            )
        else:
            self.manifest = self.manifest.model_copy(update={"shards": ()})
            self.manifest.write(self.directory)


def check_same(directory: Path, found: Manifest, wanted: Manifest) -> None:
    """Whether a dump that was begun is the one that is wanted.

    Raises:
        StoreError: it is another, naming what differs with both values.
    """
    if problems := found.disagreements(wanted):
        raise StoreError(
            f"{directory} holds another dump ('here' is that dump, 'there' the request): "
            f"{'; '.join(problems)}; give another directory, or remove this one"
        )


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
