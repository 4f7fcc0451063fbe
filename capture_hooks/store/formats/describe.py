"""What a dump is, what it says of itself, and what it does not say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DumpDescription:
    """A dump as far as it can be known without loading a pickle.

    Attributes:
        format: name of its format.
        library: whose format it is, with the versions that were read and where.
        sequences: how many.
        says: what the dump itself, or its library's own code, says: name and value, in order.
        silent: what it does not say: name, and how to state it.
    """

    format: str
    library: str
    sequences: int
    says: tuple[tuple[str, str], ...]
    silent: tuple[tuple[str, str], ...]


def describe(path: Path) -> DumpDescription:
    """Describe the dump in the directory ``path``.

    Raises:
        StoreError: it is no dump of an installed format, or damaged.
    """
    raise NotImplementedError
