"""Integer layer ids and points, both ways, one module per library.  Imports no torch."""

from .contract import Captured, Convention, Reader, Reading
from .lookup import EngineIds, convention, convention_for, engine_ids

__all__ = [
    "Captured",
    "Convention",
    "EngineIds",
    "Reader",
    "Reading",
    "convention",
    "convention_for",
    "engine_ids",
]
