"""Engines as programs: what one must do, its process and its flags, and what is done through one."""

from .contract import (
    Answer,
    CaptureEngine,
    DecodingEngine,
    EngineProvider,
    Margin,
    SequenceError,
    SequenceStates,
)

__all__ = [
    "Answer",
    "CaptureEngine",
    "DecodingEngine",
    "EngineProvider",
    "Margin",
    "SequenceError",
    "SequenceStates",
]
