"""An adapter of PEFT put into its base's weights."""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..capture.weights import is_adapter
from ..errors import ModelError

#: Tokens that merging is tried on, and by how much rounding to 16 bits may change their logits.
_TOKENS: Final = 8
_ROUNDING: Final = 0.05


def merged(base: nn.Module, adapter: str) -> nn.Module:
    """The base model with the adapter merged into its weights: a plain model again.

    Args:
        base: the model the adapter was trained on; its weights are changed.
        adapter: a directory that PEFT saved.

    Raises:
        ModelError: PEFT is missing, the adapter does not fit the model, or is of a kind that is not in the
            weights (a learnt prompt).
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ModelError(f"{adapter} is an adapter; reading it needs PEFT: pip install peft") from None
    config = peft.PeftConfig.from_pretrained(adapter)
    if getattr(config, "is_prompt_learning", False):
        raise ModelError(
            f"{adapter} is an adapter of kind {config.peft_type.value}: it puts learnt rows before every "
            "prompt and changes no weight; only adapters that change weights can be part of a target"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT only warns of is checked below
        wrapped: Any = peft.PeftModel.from_pretrained(base, adapter, config=config)
        _check_complete(peft, wrapped, adapter)
        wrapped.eval()
        before = _logits(wrapped)
        _untie(wrapped.get_base_model())
        whole: nn.Module = wrapped.merge_and_unload(safe_merge=True)
    difference = float((_logits(whole) - before).norm() / before.norm())
    if not difference <= _ROUNDING:
        raise ModelError(
            f"merging the adapter {adapter} changes what its model computes (logits by {difference:.1%}): it "
            "does more than change weights, and cannot be part of a target"
        )
    return whole


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    """The model's logits for a few fixed tokens."""
    device = model.get_input_embeddings().weight.device
    logits: Tensor = model(
        input_ids=torch.arange(1, 1 + _TOKENS, device=device)[None], use_cache=False
    ).logits
    return logits.double()


def _untie(model: Any) -> None:
    """Give the output layer a weight of its own where an adapter lies on it, or on the embedding it shares.

    Merged into the one weight of both, the adapter of one would change the other too.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if output is None or not (is_adapter(embedding) or is_adapter(output)):
        return
    inner, shared = (getattr(m, "base_layer", getattr(m, "original_module", m)) for m in (output, embedding))
    if inner.weight is shared.weight:
        inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _check_complete(peft: Any, wrapped: Any, adapter: str) -> None:
    """Whether the file's tensors are the adapter's parameters: PEFT itself leaves out what does not fit."""
    weights = peft.load_peft_weights(adapter, device="cpu")
    own = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    result = peft.set_peft_model_state_dict(wrapped, weights)
    missing, strange = sorted(own.keys() - weights.keys()), sorted(result.unexpected_keys)
    if missing or strange:
        what = f"lacks {missing[0]}" if missing else f"has {strange[0]}, which the model has no place for"
        raise ModelError(f"the adapter {adapter} does not fit its base, or is damaged: its file {what}")
