"""A head and its target -> tokens: embedded, lossless speculative decoding."""

from .decoder import Generation, SpeculativeDecoder
from .drafts import TreeShape
from .stats import DecodeStats, Round

__all__ = ["DecodeStats", "Generation", "Round", "SpeculativeDecoder", "TreeShape"]
