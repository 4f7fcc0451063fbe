"""The target answers a data set again: prompts as a server is sent them, its answers in the data's form."""

from .cost import Cost
from .embedded import EmbeddedGeneration
from .identity import model_digest
from .journal import begun_at
from .regeneration import Regenerated, Regeneration, Survey
from .sampling import describe, sampling_of

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
