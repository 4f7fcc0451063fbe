"""From one library's dump to another's: what must be known is known or asked for, then rows are streamed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .declared import Declared


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done.

    Attributes:
        read_as, written_as: names of the two formats.
        sequences, tokens: how many.
        dtype: of the states, which no conversion changes.
        spec: the points in the order of their slots, as text; None where nobody said them.
        notes: what was computed, moved, left out or cannot be known, a sentence each.
    """

    read_as: str
    written_as: str
    sequences: int
    tokens: int
    dtype: str
    spec: str | None
    notes: tuple[str, ...]


def convert_dump(
    source: Path,
    destination: Path,
    *,
    to: str,
    read_as: str | None = None,
    declared: Declared = Declared(),  # noqa: B008  # immutable
    on_progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write the dump in ``source`` as a dump of another format in ``destination``.

    Args:
        source: a dump's directory.
        destination: a new or empty directory; where our own format is written, also one in which this
            conversion was interrupted.
        to: name of the format to write.
        read_as: name of the format to read; None to recognise it.
        declared: what the files do not say.
        on_progress: called with the sequences done and their number.

    Raises:
        StoreError: anything that is not known and not declared, a file that is damaged, malformed or a pickle
            not asked for, states of another kind than the format takes, or a destination in use.
        SpecError, ConventionError: points that do not fit the target.
        ModelError: there is no such target.
    """
    raise NotImplementedError
