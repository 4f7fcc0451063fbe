"""How vLLM rewrites a config in speculators' format before its runners look for ids in it.

``vllm/transformers_utils/configs/speculators/{base,algos}.py``.  Told by a ``speculators_config`` that is not
null.  What remains is ``transformer_layer_config`` with what the type's function adds; other keys are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .vllm import Vllm

#: ``SUPPORTED_SPECULATORS_TYPES`` since 0.29.
TYPES: Final = ("eagle3", "peagle", "dflash", "dflash2", "dspark")
#: ``model_type`` values of the layers that an EAGLE-3 draft is found for, since 0.24.
LAYERS: Final = ("qwen3", "llama")


def rewritten(
    config: Mapping[str, Any], types: tuple[str, ...], layers: tuple[str, ...] | None
) -> Mapping[str, Any]:
    """The config that the runners see: the same, unless it is in speculators' format.

    Args:
        config: the head's ``config.json``.
        types: the speculators types that this version knows.
        layers: the ``model_type`` values of layers that it has an EAGLE-3 draft for; None for any.

    Raises:
        ValueError: it knows no such type, or no draft of that ``model_type``.
        KeyError: a key is missing that the type needs.
        TypeError: a value is not of the type that it needs.
    """
    if config.get("speculators_config") is None:
        return config
    kind = config.get("speculators_model_type")
    hash(kind)  # looked up in a dict
    if kind not in types:
        raise ValueError(f"speculators_model_type is {kind!r}, none of {', '.join(types)}")
    inner = config.get("transformer_layer_config", {})
    if not isinstance(inner, dict):
        raise TypeError(f"transformer_layer_config is {inner!r}, no object")
    draft = dict(inner)
    if kind in ("eagle3", "peagle"):
        _eagle(config, draft, str(kind), layers)
    else:
        _block(config, draft, str(kind))
    return draft


def _eagle(
    config: Mapping[str, Any], draft: dict[str, Any], kind: str, layers: tuple[str, ...] | None
) -> None:
    model_type = draft.get("model_type", "llama")
    if layers is not None and model_type not in layers:
        raise ValueError(f"it has no {kind} draft for layers of model_type {model_type!r}")
    draft["architectures"] = [kind]
    if kind == "peagle":
        draft["pard_token"] = config["mask_token_id"]
    if config.get(Vllm.key):
        draft[Vllm.key] = config[Vllm.key]


def _block(config: Mapping[str, Any], draft: dict[str, Any], kind: str) -> None:
    # The ids under the drafts' own keys are read by the draft alone: the runners find the first list.
    ids = config["aux_hidden_state_layer_ids"]
    draft[Vllm.key] = ids
    below = [number - 1 for number in ids]
    draft["architectures"] = [kind]
    if kind == "dspark":
        draft["target_layer_ids"] = below
    else:
        draft["dflash_config"] = {"mask_token_id": config["mask_token_id"], "target_layer_ids": below}
