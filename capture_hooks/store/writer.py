"""Writing a dump shard by shard, so that a kill at any moment loses at most the shard being made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import StoreError
from ..io import LOCK, UNFINISHED, locked, refused
from .manifest import MANIFEST, Manifest, ShardRecord
from .shard import ShardTensors, StoredSequence, check_file, columns_of, write_shard


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
