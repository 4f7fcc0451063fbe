"""Rotary embeddings whose frequencies depend on the longest position of a forward.

transformers gives them one mechanism, `dynamic_rope_update` (transformers 5.24, modeling_rope_utils.py): a
module with ``rope_type`` ``"longrope"`` switches to its long factors beyond the original context; a
``"dynamic"`` one stretches its base beyond ``max_position_embeddings`` with every length, and keeps what the
longest sequence since the last short one asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from capture_hooks.capture import LengthRule


def length_rule(model: nn.Module) -> LengthRule:
    """Which sequences the rotary embeddings of ``model`` compute alike."""
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
    if not growing:
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
