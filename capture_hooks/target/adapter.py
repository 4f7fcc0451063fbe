"""An adapter of PEFT put into its base's weights."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from ..errors import ModelError

if TYPE_CHECKING:
    from torch import nn


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
        whole: nn.Module = wrapped.merge_and_unload(safe_merge=True)
    return whole


def _check_complete(peft: Any, wrapped: Any, adapter: str) -> None:
    """Whether the file's tensors are the adapter's parameters: PEFT itself leaves out what does not fit."""
    weights = peft.load_peft_weights(adapter, device="cpu")
    own = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    result = peft.set_peft_model_state_dict(wrapped, weights)
    missing, strange = sorted(own.keys() - weights.keys()), sorted(result.unexpected_keys)
    if missing or strange:
        what = f"lacks {missing[0]}" if missing else f"has {strange[0]}, which the model has no place for"
        raise ModelError(f"the adapter {adapter} does not fit its base, or is damaged: its file {what}")
