"""One row of a data set, and the error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """A row as it was read.

    Attributes:
        place: where it stands, for messages: ``file:line``, ``directory[index]``.
        fields: its columns.
        padded: whether the source fills absent fields with None, as Arrow does (a `datasets` folder,
            Parquet), so that a None there may be no field at all.
    """

    place: str
    fields: Mapping[str, Any]
    padded: bool = False


class RowError(DataError):
    """A row that cannot be used.

    Args:
        place: where it stands.
        reason: the kind of fault in a few words, the same for all rows that have it.
        detail: what is wrong with this one and what to do; ``reason`` where there is nothing to add.
    """

    def __init__(self, place: str, reason: str, detail: str = "") -> None:
        super().__init__(f"{place}: {detail or reason}")
        self.place = place
        self.reason = reason
