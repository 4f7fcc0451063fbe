"""Binding a capture spec to a model: anatomy, unwrapping, residual layouts, hooks, packed buffers."""

from .anatomy import Anatomy, AnatomyProvider, BatchRows, LengthRule
from .plan import every_point
from .session import CaptureSession, bind
from .states import Phase, States
from .unwrap import find_anatomy

__all__ = [
    "Anatomy",
    "AnatomyProvider",
    "BatchRows",
    "CaptureSession",
    "LengthRule",
    "Phase",
    "States",
    "bind",
    "every_point",
    "find_anatomy",
]
