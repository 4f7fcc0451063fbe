"""Hidden states on disk: writing a dump, resuming it, and reading it through memory maps."""

from .data import Example, Examples, read_examples
from .dump import Dump
from .manifest import Manifest
from .model import ModelStates
from .shard import StoredSequence
from .writing import StateSource, estimate, write_dump

__all__ = [
    "Dump",
    "Example",
    "Examples",
    "Manifest",
    "ModelStates",
    "StateSource",
    "StoredSequence",
    "estimate",
    "read_examples",
    "write_dump",
]
