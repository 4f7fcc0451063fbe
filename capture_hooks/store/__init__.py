"""Hidden states on disk: writing a dump, resuming it, and reading it through memory maps."""

from .batches import plan_shards
from .data import Example, Examples, read_examples
from .dump import Dump
from .job import DumpJob, write_dump
from .manifest import Engine, Manifest, Provenance, ShardRecord
from .shard import ShardTensors, StoredSequence
from .writer import DumpWriter
from .writing import Estimate

__all__ = [
    "Dump",
    "DumpJob",
    "DumpWriter",
    "Engine",
    "Estimate",
    "Example",
    "Examples",
    "Manifest",
    "Provenance",
    "ShardRecord",
    "ShardTensors",
    "StoredSequence",
    "plan_shards",
    "read_examples",
    "write_dump",
]
