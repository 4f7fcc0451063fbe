"""Rows as the lines of a file."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping
from datetime import date
from typing import Any


class Gzipped(gzip.GzipFile):
    """Without a time in its header: the same lines give the same bytes."""

    def __init__(self, file: Any) -> None:
        super().__init__(fileobj=file, mode="wb", mtime=0, filename="")


def line_of(fields: Mapping[str, Any], dropped: Counter[str]) -> bytes:
    """One row as JSON; columns that JSON cannot hold are counted and left out."""
    kept = {}
    for name, value in fields.items():
        try:
            json.dumps(value, default=_dated)
        except (TypeError, ValueError):
            dropped[str(name)] += 1
            continue
        kept[name] = value
    try:
        return json.dumps(kept, ensure_ascii=False, default=_dated).encode() + b"\n"
    except UnicodeEncodeError:  # half of a surrogate pair in a column of its own
        return json.dumps(kept, default=_dated).encode() + b"\n"


def _dated(value: Any) -> str:
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError
