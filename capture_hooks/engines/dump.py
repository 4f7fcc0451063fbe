"""Dumping through an engine: another program runs the target, and its states come sequence by sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..errors import EngineError
from ..spec import CaptureSpec
from ..store.data import Examples
from ..store.data.examples import check_examples, check_placeholders, check_text_alone
from ..store.manifest import Engine, Manifest
from ..store.shard import ShardTensors
from ..store.writing import stored_dtype, with_shards_of
from ..target import context_length
from .contract import CaptureEngine, SequenceError, SequenceStates

#: Tokens of the first trial, which shows the states' widths and dtype, and of the one that is timed.
FIRST_TOKENS = 32
PROBE_TOKENS = 256


class EngineStates:
    """The states that an engine captures over a data set: a `StateSource` for `write_dump`.

    The engine decides which sequences share a forward pass, so a resumed dump's last bits may differ from
    those of one that was not interrupted.

    Args:
        engine: running, with ``spec``.
        trial: what `first_states` gave.
        anatomy: of the target as Hugging Face's class; its weights may be absent.
        fingerprint: of the target in the dtype that the engine runs it in.
        spec: what the engine captures.
        examples: the data, in memory.
        dtype: of the stored states; None for the engine's own.
        shard_tokens: most tokens in a shard; None for shards of about 256 MiB.

    Raises:
        SpecError: the spec does not fit the model.
        DataError: sequences with images, longer than the model's context, or with tokens outside its
            vocabulary.
        StoreError: a dtype that cannot be stored.
        EngineError: an engine whose stream is not as wide as the model's.
    """

    def __init__(
        self,
        engine: CaptureEngine,
        trial: SequenceStates,
        anatomy: Anatomy,
        fingerprint: TargetFingerprint,
        spec: CaptureSpec,
        examples: Examples,
        *,
        dtype: str | None = None,
        shard_tokens: int | None = None,
    ) -> None:
        resolved = spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
        check_text_alone(examples, engine.name)
        check_examples(examples, anatomy.vocab_size, context_length(anatomy.model))
        check_placeholders(examples, anatomy.model)
        self._engine = engine
        self._arriving: Iterator[SequenceStates] | None = None
        self._early: dict[int, SequenceStates] = {}
        manifest = Manifest(
            spec=spec.absolute(anatomy.n_layers),
            split_boundaries=tuple(sorted(anatomy.split_boundaries)),
            widths=_widths(spec, anatomy.hidden_size, trial),
            target_width=trial.target.shape[-1],
            target_input=(
                resolved.inputs.index(resolved.target) if resolved.target in resolved.inputs else None
            ),
            target_normed=resolved.target.norm,
            fingerprint=fingerprint,
            dtype=stored_dtype(dtype_of(trial) if dtype is None else dtype),
            engine=Engine(name=engine.name, version=engine.version, settings=dict(engine.settings)),
            data=examples.provenance(),
            shard_tokens=1,
            batch_tokens=engine.batch_tokens,
        )
        self.manifest = with_shards_of(manifest, shard_tokens)
        self.examples = examples

    def opened(self) -> AbstractContextManager[object]:
        """Begin anew: what arrived for another dump is forgotten.  The engine runs already."""
        self._arriving, self._early = None, {}
        return nullcontext()

    def fill(self, shard: range, tensors: ShardTensors) -> Iterator[int]:
        """Put the states of one shard where they belong; those of later shards wait for theirs."""
        if self._arriving is None:
            self._arriving = self._send(shard.start)
        starts = dict(zip(shard, tensors.starts.tolist(), strict=False))
        missing = set(shard)
        while missing:
            ready = next((number for number in missing if number in self._early), None)
            states = self._early.pop(ready) if ready is not None else next(self._arriving)
            if states.number not in missing:
                self._early[states.number] = states
                continue
            missing.discard(states.number)
            rows = slice(starts[states.number], starts[states.number] + len(states.inputs))
            tensors.states[rows] = states.inputs
            if tensors.target is not None:
                tensors.target[rows] = states.target
            assert tensors.argmax is not None
            tensors.argmax[rows] = states.argmax
            yield len(states.inputs)

    def _send(self, first: int) -> Iterator[SequenceStates]:
        """Every sequence from ``first`` on, without a pause between shards; numbered as in the data."""
        left = [example.token_ids.tolist() for example in self.examples[first:]]
        try:
            yield from self._checked(first, left)
        except SequenceError as error:
            named = self.examples[first + error.number]
            raise EngineError(f"{named.source} ({len(named)} tokens): {error.why}") from None

    def _checked(self, first: int, left: list[list[int]]) -> Iterator[SequenceStates]:
        for states in self._engine.states(left):
            number = first + states.number
            rows = [len(tensor) for tensor in (states.inputs, states.target, states.argmax)]
            length = len(self.examples[number])
            if rows != [length] * 3:
                raise SequenceError(
                    states.number,
                    f"{rows[0]} rows of inputs, {rows[1]} of the target, {rows[2]} greedy tokens",
                )
            yield SequenceStates(number, states.inputs, states.target, states.argmax)

    def seconds_per_token(self) -> float:
        """Estimated seconds for each token, from a short trial."""
        longest = max(self.examples[:64], key=len).token_ids[:PROBE_TOKENS].tolist()
        batch = [longest] * max(1, PROBE_TOKENS // len(longest))
        started = time.perf_counter()
        tokens = sum(len(states.inputs) for states in self._engine.states(batch))
        return (time.perf_counter() - started) / tokens


def first_states(engine: CaptureEngine, examples: Examples) -> SequenceStates:
    """A trial over the first few tokens: shows widths and dtype."""
    return next(iter(engine.states([examples[0].token_ids[:FIRST_TOKENS].tolist()])))


def dtype_of(trial: SequenceStates) -> str:
    """The dtype that an engine runs its target in."""
    return str(trial.inputs.dtype).removeprefix("torch.")


def _widths(spec: CaptureSpec, hidden: int, trial: SequenceStates) -> tuple[int, ...]:
    """Columns of each input: the stream's, and what is left for the one submodule there may be.

    Raises:
        EngineError: they do not add up.
    """
    modules = [point for point in spec.inputs if point.module is not None]
    rest, left = trial.inputs.shape[-1] - hidden * (len(spec) - len(modules)), len(modules)
    if rest < left or (left == 0) != (rest == 0) or left > 1:
        raise EngineError(
            f"{spec} came as {trial.inputs.shape[-1]} values a token from a stream of {hidden}"
            + ("; an engine can capture one submodule at a time, for its width shows only so" * (left > 1))
        )
    return tuple(hidden if point.module is None else rest for point in spec.inputs)
