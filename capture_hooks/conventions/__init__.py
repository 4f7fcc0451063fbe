"""Integer layer ids and points, both ways, for every library.  Imports no torch."""

from .contract import Captured, Convention, Conventions, Reader, TakenIds
from .lookup import BUILTIN, convention_for, engine_ids, meanings, require_verified

__all__ = [
    "BUILTIN",
    "Captured",
    "Convention",
    "Conventions",
    "Reader",
    "TakenIds",
    "convention_for",
    "engine_ids",
    "meanings",
    "require_verified",
]
