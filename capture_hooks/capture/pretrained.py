"""A Hugging Face model's structure from its config alone: no weights are read or downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import BindError

if TYPE_CHECKING:
    from torch import nn


def skeleton(name: str) -> nn.Module:
    """The model of a local directory or hub id, on the meta device: every module, no values.

    Raises:
        BindError: when transformers is missing, there is no readable config, or it names no language model.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise BindError("reading a model's config needs transformers: pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise BindError(f"cannot read the config of model {name!r}: {first}") from None
    with torch.device("meta"):
        return _model_class(transformers, config, name)._from_config(config)  # type: ignore[no-any-return]


def _model_class(transformers: Any, config: Any, name: str) -> Any:
    """The class its checkpoint names, else the one registered for its type as a language model."""
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, architecture, None)
        if found is not None and hasattr(found, "prepare_inputs_for_generation"):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise BindError(
        f"model {name!r} is of type {config.model_type!r}, for which this transformers "
        f"({transformers.__version__}) has no language model"
    )
