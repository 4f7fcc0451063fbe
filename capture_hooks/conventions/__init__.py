"""Integer layer ids and points, both ways, for every library.  Imports no torch."""

from .contract import Captured, Convention, Conventions, Reader, Reading
from .lookup import BUILTIN, convention_for, engine_ids, readings, require_verified

__all__ = [
    "BUILTIN",
    "Captured",
    "Convention",
    "Conventions",
    "Reader",
    "Reading",
    "convention_for",
    "engine_ids",
    "readings",
    "require_verified",
]
