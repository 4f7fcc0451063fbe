"""Dumping: a model, a spec and examples in; a directory of shards out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

from ..capture import find_anatomy
from ..capture.fingerprint import TargetFingerprint
from ..spec import CaptureSpec
from ..target import context_length
from .batches import plan_batches
from .checks import check_examples, check_placeholders
from .data import Examples
from .forward import Captured, Target
from .manifest import Engine, Manifest
from .shard import ShardTensors
from .writing import Writing, stored_dtype, with_shards_of

BATCH_TOKENS = 4096
PROBE_TOKENS = 256


class DumpJob(Writing):
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
        DataError: sequences longer than the model's context, tokens outside its vocabulary, or tokens that
            stand for images that are not there.
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
        self._lengths = [len(example) for example in examples]
        self._batch_tokens = batch_tokens
        check_examples(examples, anatomy.vocab_size, context_length(anatomy.model))
        check_placeholders(examples, anatomy.model)
        fingerprint = TargetFingerprint.of(anatomy)
        stored = stored_dtype(fingerprint.dtype if dtype is None else dtype)
        widths, target_width = self._target.check(examples[0].token_ids)
        if (seen := next((example for example in examples if example.media is not None), None)) is not None:
            self._target.check_images(seen)
        manifest = Manifest(
            spec=self._target.spec,
            split_boundaries=tuple(sorted(anatomy.split_boundaries)),
            widths=widths,
            target_width=target_width,
            target_input=self._target.target_input,
            target_normed=self._target.target_normed,
            fingerprint=fingerprint,
            dtype=stored,
            engine=_engine(anatomy.model, self._target.device),
            data=examples.provenance(),
            shard_tokens=1,
            batch_tokens=batch_tokens,
        )
        super().__init__(with_shards_of(manifest, shard_tokens), examples)

    def _open(self) -> AbstractContextManager[object]:
        return self._target.session

    def _fill(self, shard: range, tensors: ShardTensors) -> Iterator[int]:
        """Capture one shard; yields the tokens of each batch."""
        starts = dict(zip(shard, tensors.starts.tolist(), strict=False))
        waiting: tuple[list[int], Captured] | None = None
        text = [i for i in shard if self._examples[i].media is None]
        alone = [[i] for i in shard if self._examples[i].media is not None]
        alike = self._target.anatomy.lengths.alike
        for batch in plan_batches(self._lengths, text, self._batch_tokens, alike) + alone:
            captured = self._capture(batch)
            # One behind: an accelerator works on this batch while the last one is unpacked.
            if waiting is not None:
                waiting[1].fill(tensors, [starts[i] for i in waiting[0]])
            waiting = batch, captured
            yield sum(captured.lengths)
        if waiting is not None:
            waiting[1].fill(tensors, [starts[i] for i in waiting[0]])

    def _capture(self, batch: Sequence[int]) -> Captured:
        media = self._examples[batch[0]].media
        if media is not None:
            return self._target.capture_images(media.inputs())
        return self._target.capture([self._examples[i].token_ids for i in batch])

    def _seconds_per_token(self) -> float:
        example = max(self._examples[:64], key=len)
        longest = example.token_ids[:PROBE_TOKENS]
        batch = [longest] * max(1, min(PROBE_TOKENS, self._batch_tokens) // len(longest))
        with self._target.session:
            self._target.capture([longest[:8]])
            started = time.perf_counter()
            if example.media is not None:
                captured = self._target.capture_images(example.media.inputs())
            else:
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
