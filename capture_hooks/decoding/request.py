"""What one generation is asked for, with defaults, processors and stops resolved by transformers itself."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..errors import DecodingError
from .contract import LEAST_TEMPERATURE
from .sampling import Choice

#: Arguments `generate` hands on as it would itself, or that the decoding loop sets.
_IGNORED = {"use_cache", "position_ids", "logits_to_keep", "cache_position"}
#: Of these, the ones that the decoding loop sets itself.
_OWN = {"cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}
#: What marks image tokens and the like in a multimodal model's prompt; 0 is text.
_TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")
#: What belongs to a prompt's images, which transformers 5.24 encodes before the first pass.
_IMAGES = ("mm_encoder_outputs", *_TOKEN_KINDS)
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


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
