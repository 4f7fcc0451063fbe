"""What one generation is asked for: transformers itself resolves defaults, logits processors and stops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..errors import DecodingError
from .contract import LEAST_TEMPERATURE

#: Arguments `generate` hands on as it would itself, or that the decoding loop sets.
_IGNORED = {"use_cache", "position_ids", "logits_to_keep", "cache_position"}
#: Of these, the ones that the decoding loop sets itself.
_OWN = {"cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
#: What marks image tokens and the like in a multimodal model's prompt; 0 is text.
_TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")
#: What belongs to a prompt's images, which transformers 5.24 encodes before the first pass.
_IMAGES = ("mm_encoder_outputs", *_TOKEN_KINDS)
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
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


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate.

    Attributes:
        input_ids: [1, N] prompt.
        max_length: most tokens of prompt and answer together.
        eos: token ids that end the answer.
        choice: processors and sampling.
        criteria: further stopping criteria, asked after every token as `generate` does.
        inputs: what `generate` hands to the model's ``prepare_inputs_for_generation`` beside ids and cache:
            the prompt's position ids, the features of its images and so on.
        return_dict: whether the caller wants a `GenerateDecoderOnlyOutput`.
    """

    input_ids: Tensor
    max_length: int
    eos: frozenset[int]
    choice: Choice
    criteria: tuple[StoppingCriteria, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)
    return_dict: bool = False

    def stopped(self, ids: Tensor) -> bool:
        """Whether one of the further criteria ends the answer after ids [1, T]."""
        return any(bool(criterion(ids, None).any()) for criterion in self.criteria)


def collect(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    **model_kwargs: Any,
) -> Request:
    """A ``custom_generate`` callable that decodes nothing and hands back the resolved request.

    Raises:
        DecodingError: for anything that cannot be served losslessly.
    """
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise DecodingError(
            f"generation mode {mode.value!r} is not supported: only greedy search and sampling "
            "of one sequence are (num_beams=1, no assistant, no contrastive search)"
        )
    temperature = generation_config.temperature
    if mode is GenerationMode.SAMPLE and temperature is not None and temperature < LEAST_TEMPERATURE:
        raise DecodingError(
            f"temperature {temperature} is so small that scores divided by it are infinite; "
            "decode greedily instead"
        )
    if input_ids.shape[0] != 1:
        raise DecodingError(
            f"speculative decoding serves one sequence at a time, not a batch of {input_ids.shape[0]} "
            "(num_return_sequences counts too)"
        )
    if synced_gpus:
        raise DecodingError("synced_gpus=True (a model sharded by FSDP or ZeRO-3) is not supported")
    if generation_config.use_cache is False:
        raise DecodingError("use_cache=False: speculative decoding keeps a key/value cache by its nature")
    if wanted := [name for name in _OUTPUTS if getattr(generation_config, name, None)]:
        raise DecodingError(f"{wanted[0]}=True is not supported: rows of rejected drafts would be mixed in")
    _check_model_arguments(model_kwargs)
    assert generation_config.max_length is not None  # generate has resolved it
    eos = getattr(generation_config, "_eos_token_tensor", None)
    native = (EosTokenCriteria, MaxLengthCriteria)
    return Request(
        input_ids=input_ids,
        max_length=generation_config.max_length,
        eos=frozenset() if eos is None else frozenset(eos.tolist()),
        choice=Choice(logits_processor, bool(generation_config.do_sample)),
        criteria=tuple(c for c in stopping_criteria if not isinstance(c, native)),
        inputs={k: v for k, v in model_kwargs.items() if v is not None and k not in _OWN},
        return_dict=bool(generation_config.return_dict_in_generate),
    )


def prepare(model: Any, input_ids: Tensor, **arguments: Any) -> Request:
    """Resolve ``model.generate``'s arguments into a request without decoding.

    Raises:
        DecodingError: for anything that cannot be served losslessly.
    """
    # generate does not hand its tokenizer on to a callable, so what needs one is resolved here.
    tokenizer = arguments.pop("tokenizer", None)
    if _setting(model, arguments, "token_healing"):
        raise DecodingError("token_healing=True is not supported: it changes the prompt; heal it beforehand")
    if stop_strings := _setting(model, arguments, "stop_strings"):
        given = arguments.get("stopping_criteria") or ()
        stop = stop_at(stop_strings, tokenizer)
        arguments |= {"stop_strings": None, "stopping_criteria": StoppingCriteriaList([*given, stop])}
    # Without a mask, generate would guess one by looking for the padding token in the prompt.
    arguments.setdefault("attention_mask", torch.ones_like(input_ids))
    with torch.no_grad():
        request = model.generate(input_ids, custom_generate=collect, **arguments)
    assert isinstance(request, Request)
    return request


def stop_at(stop_strings: Any, tokenizer: Any) -> StopStringCriteria:
    """transformers' own criterion for ``stop_strings``.

    Raises:
        DecodingError: without a tokenizer, or for strings that its vocabulary cannot spell.
    """
    if tokenizer is None:
        raise DecodingError(f"stop_strings={stop_strings!r} needs the target's tokenizer: pass tokenizer=")
    try:
        return StopStringCriteria(tokenizer, stop_strings)
    except ValueError as error:
        raise DecodingError(f"stop_strings={stop_strings!r}: {error}") from error


def _setting(model: Any, arguments: dict[str, Any], name: str) -> Any:
    """A generation setting by `generate`'s order: the argument, the config given, the model's own config."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), getattr(model, "generation_config", None))
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


def _check_model_arguments(model_kwargs: dict[str, Any]) -> None:
    images = _IMAGES if model_kwargs.get("mm_encoder_outputs") else ()
    for name, value in model_kwargs.items():
        if value is None or name in _IGNORED or name in images or _empty(value):
            continue
        if name in ("cache", "past_key_values"):
            if value.get_seq_length() > 0:
                raise DecodingError(
                    f"{name}= already holds {value.get_seq_length()} tokens: continuing from a filled "
                    "cache is not supported, because the head needs the states of the whole prompt"
                )
        elif name == "attention_mask":
            # generate has already dropped a mask of all ones.
            if not bool((value == 1).all()):
                raise DecodingError("attention_mask hides prompt tokens: remove the padding from the prompt")
        elif name in _TOKEN_KINDS and not bool(value.any()):
            continue
        else:
            raise DecodingError(f"{name}= is not supported by speculative decoding: give token ids only")


def _empty(value: Any) -> bool:
    """Whether an argument says nothing: multimodal models are handed empty containers with every text."""
    return isinstance(value, Sized) and not isinstance(value, Tensor | Cache) and len(value) == 0


class Choice:
    """What the target would emit after each node, under one generation's processors.

    A verification pass yields one row of logits per drafted node.  A processor sees each row together with
    the tokens before it, exactly as `model.generate` would have shown it; processors that keep state from
    one call to the next cannot be shown several futures and are refused.
    """

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
