"""What commands are pointed at: the target model and its tokenizer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import ModelError

if TYPE_CHECKING:
    from torch import nn


def load_config(model: str) -> Any:
    """The text configuration of the model alone.

    Raises:
        ModelError: when there is no such model.
    """
    return load_whole_config(model).get_text_config()


def load_whole_config(model: str) -> Any:
    """The whole configuration of the model, whose ``model_type`` is the one that servers go by.

    Raises:
        ModelError: when there is no such model.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise _unreadable(model, error) from error


def load_target(model: str, dtype: str, device: str | None) -> nn.Module:
    """The target, in eval mode, on this process's device (a GPU if there is one and none is named).

    Raises:
        ModelError: when there is no such model, or no such device.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers gives no types
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        if torch.device(device).type == "cuda":
            torch.cuda.set_device(torch.device(device).index or 0)
        torch.empty(0, device=device)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ModelError(f"cannot use the device {device!r}: {str(error).splitlines()[0]}") from None
    try:
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise _unreadable(model, error) from error
    return loaded.to(device).eval()


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer, or None where it has none: token ids need none, and readers of text say so."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None


def _unreadable(model: str, error: Exception) -> ModelError:
    return ModelError(f"cannot load the model {model}: {str(error).splitlines()[0]}")
