"""The hash behind SGLang's seeded sampling (``kernels/ops/sampling/murmur_hash.py``, SGLang 0.5.23)."""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def _times(a: Tensor, b: int) -> Tensor:
    """``a * b`` modulo 2^32 in int64, where the whole product would not fit."""
    return ((a * (b & 0xFFFF)) + (((a * (b >> 16)) & 0xFFFF) << 16)) & _LOW


def _rotate(a: Tensor, bits: int) -> Tensor:
    return ((a << bits) | (a >> (32 - bits))) & _LOW


def _mix(state: Tensor, block: Tensor) -> Tensor:
    block = _times(_rotate(_times(block, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state ^ block, 13) * 5 + 0xE6546B64) & _LOW


def murmur_hash32_cpu(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit, seed 0) of the 16 bytes ``seed | position | column``, little endian.

    Args:
        seed: ``[n]``, 64 bit each.
        positions: ``[n]``, the low 32 bits count.
        col_indices: ``[m]``, the low 32 bits count.

    Returns:
        ``[n, m]``, uint32.
    """
    seed, positions = seed.long().unsqueeze(1), positions.long().unsqueeze(1)
    state = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, positions & _LOW, col_indices.long().unsqueeze(0) & _LOW):
        state = _mix(state, block)
    state = state ^ 16  # the length in bytes
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)
