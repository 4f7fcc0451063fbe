"""Integer layer ids and points, both ways, one module per library.  Imports no torch."""

from .contract import Captured, Convention, Reader, Reading
from .lookup import (
    EngineIds,
    Meaning,
    convention,
    convention_for,
    engine_ids,
    in_force,
    meaning,
    readings,
    require_verified,
)

__all__ = [
    "Captured",
    "Convention",
    "EngineIds",
    "Meaning",
    "Reader",
    "Reading",
    "convention",
    "convention_for",
    "engine_ids",
    "in_force",
    "meaning",
    "readings",
    "require_verified",
]
