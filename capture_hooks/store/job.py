"""Dumping: a model, a spec and examples in; a directory of shards out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from ..capture import find_anatomy
from ..capture.fingerprint import TargetFingerprint
from ..errors import StoreError
from ..spec import CaptureSpec
from .batches import plan_batches, plan_shards
from .checks import check_examples, check_finite, context_length
from .data import Examples
from .forward import Captured, Target
from .manifest import MANIFEST, Dtype, Engine, Manifest
from .shard import DTYPES, ShardTensors
from .writer import DumpWriter, check_same

#: A shard's size unless its tokens are given: it is held in memory twice (filled, and being written).
SHARD_BYTES = 256 * 2**20
BATCH_TOKENS = 4096
PROBE_TOKENS = 256


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


class DumpJob:
    """A dump that has been checked and can be run; see `write_dump` for the whole in one call.

    Args:
        model: the target, in eval mode, on its device.
        spec: what to capture.
        examples: the data, in memory.
        dtype: of the stored states: float32, bfloat16 or float16; None for the model's own.
        shard_tokens: most tokens in a shard; None for shards of about 256 MiB.
        batch_tokens: most tokens, padding included, in one forward pass.

    Raises:
        SpecError, BindError: the spec does not fit the model.
        DataError: sequences longer than the model's context, or tokens outside its vocabulary.
        StoreError: a dtype that cannot be stored, or a model that cannot be dumped.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: CaptureSpec,
        examples: Examples,
        *,
        dtype: str | None = None,
        shard_tokens: int | None = None,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        anatomy = find_anatomy(model)
        self._target = Target(model, spec, anatomy)
        self._examples = examples
        self._lengths = [len(example) for example in examples]
        check_examples(examples, anatomy.vocab_size, context_length(anatomy.model))
        fingerprint = TargetFingerprint.of(anatomy)
        dtype = fingerprint.dtype if dtype is None else dtype
        if dtype not in DTYPES:
            raise StoreError(f"states cannot be stored as {dtype}; choose a dtype of {', '.join(DTYPES)}")
        widths, target_width = self._target.check(examples[0].token_ids)
        manifest = Manifest(
            spec=self._target.spec,
            split_boundaries=tuple(sorted(anatomy.split_boundaries)),
            widths=widths,
            target_width=target_width,
            target_input=self._target.target_input,
            target_normed=self._target.target_normed,
            fingerprint=fingerprint,
            dtype=cast(Dtype, dtype),
            engine=_engine(anatomy.model, self._target.device),
            data=examples.provenance(),
            shard_tokens=1,
            batch_tokens=batch_tokens,
        )
        if shard_tokens is None:
            shard_tokens = max(1, SHARD_BYTES // manifest.row_bytes)
        #: What the finished dump's manifest says, without its shards.
        self.manifest = manifest.model_copy(update={"shard_tokens": shard_tokens})
        self._shards = plan_shards(self._lengths, shard_tokens)

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
            self._target.session,
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

    def _fill(self, shard: range, tensors: ShardTensors) -> Iterator[int]:
        """Capture one shard; yields the tokens of each batch."""
        starts = dict(zip(shard, tensors.starts.tolist(), strict=False))
        waiting: tuple[list[int], Captured] | None = None
        for batch in plan_batches(self._lengths, shard, self.manifest.batch_tokens):
            captured = self._target.capture([self._examples[i].token_ids for i in batch])
            # One behind: an accelerator works on this batch while the last one is unpacked.
            if waiting is not None:
                waiting[1].fill(tensors, [starts[i] for i in waiting[0]])
            waiting = batch, captured
            yield sum(captured.lengths)
        if waiting is not None:
            waiting[1].fill(tensors, [starts[i] for i in waiting[0]])

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

    def _seconds_per_token(self) -> float:
        longest = max(self._examples[:64], key=len).token_ids[:PROBE_TOKENS]
        batch = [longest] * max(1, min(PROBE_TOKENS, self.manifest.batch_tokens) // len(longest))
        with self._target.session:
            self._target.capture([longest[:8]])
            started = time.perf_counter()
            captured = self._target.capture(batch)
            captured.wait()
            return (time.perf_counter() - started) / sum(captured.lengths)


def write_dump(
    model: nn.Module,
    spec: CaptureSpec,
    examples: Examples,
    directory: str | Path,
    *,
    dtype: str | None = None,
    shard_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    on_progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Dump the states of ``spec`` over ``examples``, or finish such a dump; see `DumpJob`."""
    job = DumpJob(model, spec, examples, dtype=dtype, shard_tokens=shard_tokens, batch_tokens=batch_tokens)
    return job.run(directory, on_progress)


def _engine(model: nn.Module, device: torch.device) -> Engine:
    settings = {"torch": torch.__version__, "device": device.type}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention is not None:
        settings["attention"] = str(attention)
    libraries = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    library = "transformers" if "transformers" in libraries else libraries[0]
    version = getattr(__import__(library), "__version__", "unknown")
    return Engine(name=library, version=str(version), settings=settings)
