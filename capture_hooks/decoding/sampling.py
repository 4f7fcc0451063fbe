"""The target's next-token choice, with transformers' own logits processors.

A verification pass yields one row of logits per drafted node.  A processor sees each row together with
the tokens before it, exactly as `model.generate` would have shown it; processors that keep state from
one call to the next cannot be shown several futures and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

from ..errors import DecodingError

#: Processors that look at the scores alone: all rows can go through them at once.
_ROWWISE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)
#: Of these, the ones that make sense on a draft vocabulary of another size.
_WARPERS = _ROWWISE[:5]
#: Processors whose answer depends on the tokens so far and nothing else.
_PURE = (
    *_ROWWISE,
    logits_process.TopHLogitsWarper,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.WatermarkLogitsProcessor,
)


class Choice:
    """What the target would emit after each node, under one generation's processors."""

    def __init__(self, processors: Sequence[LogitsProcessor], sample: bool) -> None:
        """Check that every processor can be served.

        Raises:
            DecodingError: naming the processor that cannot.
        """
        for processor in processors:
            _require_pure(processor)
        self.sample = sample
        self._processors = LogitsProcessorList(processors)
        self._rowwise = all(isinstance(p, _ROWWISE) for p in processors)
        self._draft_warpers = LogitsProcessorList(p for p in processors if isinstance(p, _WARPERS))

    @property
    def needs_prefixes(self) -> bool:
        """Whether `scores` reads the tokens before each row."""
        return not self._rowwise

    def scores(self, logits: Tensor, prefixes: Sequence[Tensor]) -> Tensor:
        """Processed float32 scores [M, V] of logits [M, V].

        ``prefixes[i]`` [1, T_i] are the tokens before row i; read only where `needs_prefixes`.
        """
        scores = logits.float()
        if not self._processors:
            return scores
        if self._rowwise:
            # None of these reads the tokens; the argument only has to be there.
            return self._apply(
                self._processors, torch.empty(len(scores), 0, dtype=torch.long), scores.clone()
            )
        rows = [
            self._apply(self._processors, prefix, row[None].clone())
            for prefix, row in zip(prefixes, scores, strict=True)
        ]
        return torch.cat(rows)

    def probabilities(self, scores: Tensor) -> Tensor:
        """The sampling distributions of processed scores."""
        return scores.softmax(-1)

    def pick(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token id per row: arg-max, or a sample."""
        if not self.sample:
            return scores.argmax(-1)
        return torch.multinomial(self.probabilities(scores), 1, generator=generator)[:, 0]

    def warp(self, logits: Tensor) -> Tensor:
        """The same temperature and truncation applied to draft logits: a proposal near the target's law."""
        ids = torch.empty(len(logits), 0, dtype=torch.long)
        return self._apply(self._draft_warpers, ids, logits.clone()).softmax(-1)

    @staticmethod
    def _apply(processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
        out: Tensor = processors(ids, scores)  # type: ignore[arg-type]  # int64 and float32, as it asks
        return out


def _require_pure(processor: LogitsProcessor) -> None:
    if isinstance(processor, _PURE) or getattr(processor, "depends_only_on_prefix", False):
        return
    raise DecodingError(
        f"logits processor {type(processor).__qualname__} may carry state from one step to the next, and "
        "speculative decoding shows it several possible futures at once; if its answer depends on the "
        "tokens so far alone, set its attribute depends_only_on_prefix = True, else use model.generate "
        "without custom_generate"
    )
