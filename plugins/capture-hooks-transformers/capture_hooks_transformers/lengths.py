"""Models of transformers that compute a row otherwise in a longer forward.

Rotary embeddings whose frequencies depend on the longest position have one mechanism, `dynamic_rope_update`
(transformers 5.24, modeling_rope_utils.py): a module with ``rope_type`` ``"longrope"`` switches to its long
factors beyond the original context; a ``"dynamic"`` one stretches its base beyond ``max_position_embeddings``
with every length, and keeps what the longest sequence since the last short one asked for.

Dynamic mask attention (Doge) keeps the keys with the ``keep_window_size`` largest of scores that repeat with
the token; which of two equal ones it keeps is decided by how a kernel rounds in a forward of that shape.

A model whose cache slides over a window and whose masks do not (Moshi) lets the later of several tokens see
keys that it would have forgotten had they come one by one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from capture_hooks.capture import LengthRule

#: The makers of masks in transformers' masking_utils.py.
_MASK = re.compile("create_.*causal_mask")


def _unmasked_window(model: nn.Module) -> int | None:
    """The window beyond which a cache forgets keys that the model's masks would let it see."""
    made = {name for name in vars(sys.modules[type(model).__module__]) if _MASK.fullmatch(name)}
    if made != {"create_causal_mask"}:
        return None
    cache: Any = DynamicCache(config=model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    return next((layer.sliding_window for layer in cache.layers if getattr(layer, "is_sliding", False)), None)


def length_rule(model: nn.Module) -> LengthRule:
    """Which sequences ``model`` computes alike."""
    switches: set[int] = set()
    separate: list[int] = []
    growing: list[tuple[Any, dict[str, str]]] = []
    for module, kind, layer_type in rope_types(model):
        if kind == "longrope":
            settings = module.config.rope_parameters
            if layer_type is not None:
                settings = settings[layer_type]
            switches.add(int(settings["original_max_position_embeddings"]))
        elif "dynamic" in kind:
            separate.append(int(module.original_max_seq_len))
            growing.append((module, {} if layer_type is None else {"layer_type": layer_type}))
    windows = [getattr(module, "keep_window_size", None) for module in model.modules()]
    windows.append(_unmasked_window(model))
    separate += [window for window in windows if isinstance(window, int)]
    if not separate:
        return LengthRule(frozenset(switches))

    def forget() -> None:
        # A sequence of one token: the module goes back to its original frequencies by itself.
        for module, arguments in growing:
            device = next(module.buffers()).device
            first = torch.zeros(1, 1, dtype=torch.long, device=device)
            module(torch.empty(0, device=device), first, **arguments)

    return LengthRule(frozenset(switches), min(separate), forget)


def rope_types(model: nn.Module) -> Iterator[tuple[Any, str, str | None]]:
    """Every rotary embedding with its RoPE type, once for each type of layer that has one of its own."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            yield module, kinds, None
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                yield module, kind, layer_type
