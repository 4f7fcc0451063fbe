"""Hidden states on disk: writing a dump, resuming it, and reading it through memory maps."""

from .data import Example, Examples, read_examples
from .dump import Dump
from .manifest import Engine, Manifest, Provenance, ShardRecord
from .shard import ShardTensors, StoredSequence
from .writer import DumpWriter, plan_shards

__all__ = [
    "Dump",
    "DumpWriter",
    "Engine",
    "Example",
    "Examples",
    "Manifest",
    "Provenance",
    "ShardRecord",
    "ShardTensors",
    "StoredSequence",
    "plan_shards",
    "read_examples",
]
