"""Tiny random language models of many families, and tiny tokenizers: no network, built in milliseconds.

Every model is an ordinary transformers model on the CPU, float32, in eval mode.  Its weights come from a
seed and are large enough that each layer visibly changes the stream; norm weights, biases and other
vectors are random too, so that a forgotten norm, scale or bias shows as a wrong number.

>>> from capture_hooks.testing import tiny
>>> model = tiny.llama(num_hidden_layers=8)
>>> tokens = tiny.tokenizer()("hello", return_tensors="pt")
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

from .tiny_families import FAMILIES, HIDDEN, LAYERS, VOCAB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = ["CHATML", "CHATML_MARKED", "HIDDEN", "LAYERS", "VOCAB", "families", "llama", "model", "tokenizer"]

#: A ChatML template, as most open chat models carry it.
CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: The same text with transformers' ``generation`` markers around the assistant's tokens.
CHATML_MARKED: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}{{ '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}"  # Jinja trims one after a tag
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def families() -> tuple[str, ...]:
    """Names that `model` takes."""
    return tuple(FAMILIES)


def model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of one family.

    Args:
        family: one of `families`.
        seed: seed of the weights; the same seed gives the same weights in every process.
        overrides: fields of the family's config (of the text config in nested families).

    Raises:
        KeyError: naming the families there are.
    """
    if family not in FAMILIES:
        raise KeyError(f"no tiny family {family!r}; there are: {', '.join(FAMILIES)}")
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    entry = FAMILIES[family]
    config = entry.config(**overrides)
    auto: Any = AutoModelForImageTextToText if entry.multimodal else AutoModelForCausalLM
    with _seeded(seed):
        built: PreTrainedModel = auto.from_config(config)
        randomise(built)
    built.eval()  # type: ignore[no-untyped-call]  # transformers leaves nn.Module.eval unannotated
    return built


def llama(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random Llama: ``LAYERS`` layers, ``HIDDEN`` wide, ``VOCAB`` tokens unless overridden."""
    return model("llama", seed=seed, **overrides)


def tokenizer(
    chat_template: str | None = CHATML, extra: Mapping[str, str] | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that encodes any text losslessly; its ids fit every tiny model.

    ``<|endoftext|>`` = 0 pads, ``<|im_start|>`` = 1 begins, ``<|im_end|>`` = 2 ends.

    Args:
        chat_template: a Jinja template, or None for a tokenizer without one.
        extra: more special tokens by attribute (``image_token``, ...), with ids from 259 on.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *letters))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        tokenizer_object=backend,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        clean_up_tokenization_spaces=False,
        extra_special_tokens=dict(extra or {}),
    )
    made.chat_template = chat_template
    return made


def randomise(module: nn.Module) -> None:
    """Give every parameter a random value of a size that keeps a random network well behaved.

    Matrices get a standard deviation of about ``1/sqrt(fan-in)``; vectors (norm weights, biases,
    attention sinks) keep their initial value plus noise.
    """
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.8 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator inside the block and give the caller's state back."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
