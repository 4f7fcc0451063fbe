"""Rotary position embedding: the target's settings, as tables of cosines and sines.

Angles are computed in float64 and rounded once, so a head in float64 is exact and one in bfloat16
no worse than its format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from capture_hooks.errors import HeadError

#: Settings of LongRoPE with one factor for each pair of channels that is turned.
PER_PAIR = ("short_factor", "long_factor")


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim // 2] in float64 and the factor on cosines and sines.

    ``default``, ``linear`` and ``llama3`` are computed here; any other type comes from
    ``transformers.modeling_rope_utils`` (for a sequence within the original context where the
    type depends on length).

    Raises:
        HeadError: for a type nobody knows, one that needs transformers where it is missing, or factors for
            another number of channels.
    """
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    theta = float(rope.get("rope_theta", 10000.0))
    for key in PER_PAIR:
        factors = rope.get(key)
        if isinstance(factors, list) and len(factors) != head_dim // 2:
            raise HeadError(
                f"RoPE type {kind!r}: {key} lists {len(factors)} factors, but a head of head_dim {head_dim} "
                f"turns {head_dim // 2} pairs of channels; give rope settings made for the head"
            )
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    return _from_transformers(kind, rope, head_dim, max_positions)


def _llama3(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's scaling: long wavelengths divided by ``factor``, a smooth band between."""
    original = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[k]) for k in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = original * plain / (2 * math.pi)  # full turns over the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (smooth + (1 - smooth) / factor)


def _from_transformers(
    kind: str, rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    try:
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    except ImportError:
        raise HeadError(f"RoPE type {kind!r} needs transformers: pip install 'transformers>=5.5'") from None
    if kind not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(sorted({"default", "linear", "llama3", *ROPE_INIT_FUNCTIONS}))
        raise HeadError(f"RoPE type {kind!r} of the target is unknown; known types: {known}")
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.double(), float(factor)


class RotaryTable:
    """Cosines and sines by position, grown on demand and kept per device and dtype."""

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        self.frequencies, self.factor = frequencies, factor
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def upto(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables [at least ``length``, head_dim // 2]."""
        found = self._tables.get((device, dtype))
        if found is None or found[0].shape[0] < length:
            size = 1 << max(length - 1, 255).bit_length()
            angles = torch.outer(torch.arange(size, dtype=torch.float64), self.frequencies)
            cos, sin = ((f(angles) * self.factor).to(device, dtype) for f in (torch.cos, torch.sin))
            found = self._tables[device, dtype] = (cos, sin)
        return found


def at(table: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, head_dim // 2] of positions [T]."""
    return table[0].index_select(0, positions), table[1].index_select(0, positions)
