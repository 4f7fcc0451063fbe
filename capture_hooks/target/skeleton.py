"""Which class a checkpoint is opened with, and its structure from the config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelError
from .location import locate
from .reading import reading, transformers_here

if TYPE_CHECKING:
    from torch import nn


def skeleton(name: str) -> nn.Module:
    """The model of a local directory or hub id, on the meta device, in eval mode: every module, no values.

    Raises:
        ModelError: when transformers is missing, there is no readable config, or it names no language model.
    """
    config = read_config(name)
    with reading(name), torch.device("meta"):
        chosen, settings = model_class(config, name)
        built: nn.Module = chosen._from_config(settings)
        return built.eval()


def read_config(name: str) -> Any:
    """The whole configuration, as transformers reads it; code that a checkpoint brings along is not run.

    Raises:
        ModelError: when transformers is missing, or there is no readable config.
    """
    transformers = transformers_here()
    base = locate(name).base
    with reading(name):
        return transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)


def model_class(config: Any, name: str) -> tuple[Any, Any]:
    """The class of a language model and the configuration it is built with.

    The class that the checkpoint names, where it is one that generates; else the one registered for the type
    as a causal language model, else as a multimodal one (images and text to text).

    Raises:
        ModelError: this transformers has no language model of the type.
    """
    transformers = transformers_here()
    for architecture in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(architecture), None)
        if found is not None and hasattr(found, "prepare_inputs_for_generation"):
            return found, _of_class(found, config)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            found = auto._model_mapping[type(config)]
            found = found[0] if isinstance(found, list | tuple) else found
            return found, _of_class(found, config)
    raise ModelError(
        f"model {name!r} is of type {config.model_type!r}, for which this transformers "
        f"({transformers.__version__}) has no language model"
    )


def is_multimodal(config: Any) -> bool:
    """Whether a configuration is of a model that reads images beside text."""
    return type(config) in transformers_here().AutoModelForImageTextToText._model_mapping


def _of_class(found: Any, config: Any) -> Any:
    """The part of a multimodal configuration that a class of its text decoder alone is built with."""
    text = config.get_text_config()
    alone = text is not config and getattr(found, "config_class", None) is type(text)
    return text if alone else config
