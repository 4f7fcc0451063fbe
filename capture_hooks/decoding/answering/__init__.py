"""The target answers a data set again: prompts as a server is sent them, its answers in the data's form."""

from .embedded import EmbeddedGeneration
from .journal import begun_at
from .provenance import describe, model_digest, sampling_of
from .regeneration import Cost, Regenerated, Regeneration, Survey

__all__ = [
    "Cost",
    "EmbeddedGeneration",
    "Regenerated",
    "Regeneration",
    "Survey",
    "begun_at",
    "describe",
    "model_digest",
    "sampling_of",
]
