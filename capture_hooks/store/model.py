"""The states of a model in this process, as a dump's source.

Which sequences share a forward pass depends on the lengths, the limits and the model's rule alone, never on
where a run was interrupted: a resumed run makes the same batches, so the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from ..capture import find_anatomy
from ..capture.fingerprint import TargetFingerprint
from ..spec import CaptureSpec
from ..target import context_length
from ..target.states import BatchForward, CapturedBatch
from .data import Examples
from .data.examples import check_examples, check_placeholders
from .manifest import Engine, Manifest
from .shard import ShardTensors
from .writing import stored_dtype, with_shards_of

BATCH_TOKENS = 4096
PROBE_TOKENS = 256


class ModelStates:
    """The states of a model in this process over a data set, checked: a `StateSource` for `write_dump`.

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
        self._forward = BatchForward(model, spec, anatomy)
        self._lengths = [len(example) for example in examples]
        self._batch_tokens = batch_tokens
        check_examples(examples, anatomy.vocab_size, context_length(anatomy.model))
        check_placeholders(examples, anatomy.model)
        fingerprint = TargetFingerprint.of(anatomy)
        stored = stored_dtype(fingerprint.dtype if dtype is None else dtype)
        widths, target_width = self._forward.check(examples[0].token_ids)
        if (seen := next((example for example in examples if example.media is not None), None)) is not None:
            assert seen.media is not None
            self._forward.check_images(seen.media.inputs(), seen.token_ids, seen.last_learnt)
        manifest = Manifest(
            spec=self._forward.spec,
            split_boundaries=tuple(sorted(anatomy.split_boundaries)),
            widths=widths,
            target_width=target_width,
            target_input=self._forward.target_input,
            target_normed=self._forward.target_normed,
            fingerprint=fingerprint,
            dtype=stored,
            engine=_engine(anatomy.model, self._forward.device),
            data=examples.provenance(),
            shard_tokens=1,
            batch_tokens=batch_tokens,
        )
        self.manifest = with_shards_of(manifest, shard_tokens)
        self.examples = examples

    def opened(self) -> AbstractContextManager[object]:
        """The capture session, entered while the dump is written."""
        return self._forward.session

    def fill(self, shard: range, tensors: ShardTensors) -> Iterator[int]:
        """Capture one shard; yields the tokens of each batch."""
        starts = dict(zip(shard, tensors.starts.tolist(), strict=False))
        waiting: tuple[list[int], CapturedBatch] | None = None
        text = [i for i in shard if self.examples[i].media is None]
        alone = [[i] for i in shard if self.examples[i].media is not None]
        alike = self._forward.anatomy.lengths.alike
        for batch in plan_batches(self._lengths, text, self._batch_tokens, alike) + alone:
            captured = self._capture(batch)
            # One behind: an accelerator works on this batch while the last one is unpacked.
            if waiting is not None:
                _put(waiting[1], tensors, [starts[i] for i in waiting[0]])
            waiting = batch, captured
            yield sum(captured.lengths)
        if waiting is not None:
            _put(waiting[1], tensors, [starts[i] for i in waiting[0]])

    def _capture(self, batch: Sequence[int]) -> CapturedBatch:
        media = self.examples[batch[0]].media
        if media is not None:
            return self._forward.capture_images(media.inputs())
        return self._forward.capture([self.examples[i].token_ids for i in batch])

    def seconds_per_token(self) -> float:
        """Estimated seconds for each token, from a short trial."""
        example = max(self.examples[:64], key=len)
        longest = example.token_ids[:PROBE_TOKENS]
        batch = [longest] * max(1, min(PROBE_TOKENS, self._batch_tokens) // len(longest))
        with self._forward.session:
            self._forward.capture([longest[:8]])
            started = time.perf_counter()
            if example.media is not None:
                captured = self._forward.capture_images(example.media.inputs())
            else:
                captured = self._forward.capture(batch)
            captured.wait()
            return (time.perf_counter() - started) / sum(captured.lengths)


def _put(captured: CapturedBatch, shard: ShardTensors, starts: Sequence[int]) -> None:
    """Write each sequence's rows into ``shard`` from its start, cast to the shard's dtype."""
    captured.wait()
    at = 0
    for row, (start, length) in enumerate(zip(starts, captured.lengths, strict=True)):
        rows = slice(start, start + length)
        shard.states[rows] = captured.states[row, :length]
        if shard.target is not None:
            assert captured.target is not None
            shard.target[rows] = captured.target[row, :length]
        assert shard.argmax is not None
        shard.argmax[rows] = captured.argmax[at : at + length]
        at += length


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


def _engine(model: nn.Module, device: torch.device) -> Engine:
    settings = {"torch": torch.__version__, "device": device.type}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if attention is not None:
        settings["attention"] = str(attention)
    libraries = [cls.__module__.partition(".")[0] for cls in type(model).__mro__]
    library = "transformers" if "transformers" in libraries else libraries[0]
    version = getattr(__import__(library), "__version__", "unknown")
    return Engine(name=library, version=str(version), settings=settings)
