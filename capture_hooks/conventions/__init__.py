"""Integer layer ids and points, both ways, one module per library.  Imports no torch."""

from .contract import Convention
from .lookup import EngineIds, convention, convention_for, engine_ids

__all__ = ["Convention", "EngineIds", "convention", "convention_for", "engine_ids"]
