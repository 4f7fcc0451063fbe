"""Ranges of a library's versions: ``"0.5.9 to 0.5.21"``, ``"0.33.0"``, ``"to 0.3.0"``."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ..errors import ConventionError

_VERSION = re.compile(r"\d+(?:\.\d+)*(?:\.?(?:post|rc|dev)\d+)?(?:\+[A-Za-z0-9.]+)?")


@dataclass(frozen=True, slots=True)
class Versions:
    """From ``first`` to ``last``, both included; None where a side is open.

    >>> "0.5.12.post1" in Versions.parse("0.5.9 to 0.5.21")
    True
    """

    first: tuple[int, ...] | None
    last: tuple[int, ...] | None

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> Self:
        """Read one range.

        Raises:
            ConventionError: it is none.
        """
        low, to, high = text.partition("to ")
        if not to:
            high = low
        if not (low.strip() or high.strip()):
            raise ConventionError(f"{text!r} is no range of versions; write '0.5.9 to 0.5.23' or '0.33.0'")
        return cls(release(low) if low.strip() else None, release(high) if high.strip() else None)

    def __contains__(self, version: str) -> bool:
        number = release(version)
        return (self.first is None or self.first <= number) and (
            self.last is None or number[: len(self.last)] <= self.last
        )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version; what follows them (``.post1``, ``+cpu``) does not change what ids mean.

    Raises:
        ConventionError: it is no version.
    """
    word = version.strip()
    if not _VERSION.fullmatch(word):
        raise ConventionError(f"{version!r} is no version such as 0.5.23")
    numbers = re.match(r"\d+(?:\.\d+)*", word)
    assert numbers is not None
    return tuple(int(part) for part in numbers[0].split("."))


def joined(ranges: Sequence[str]) -> str:
    """Ranges as one text, those that follow one another without a release between them made one.

    >>> joined(["0.33.0", "0.30.0 to 0.32.0", "0.25.1 to 0.26.0"])
    '0.25.1 to 0.26.0, 0.30.0 to 0.33.0'
    """
    parts: list[list[str]] = []
    for text in sorted(ranges, key=lambda text: Versions.parse(text).first or ()):
        low, _, high = text.rpartition("to ") if text.startswith("to ") else text.partition(" to ")
        last = high or low
        if parts and _follows(parts[-1][-1], low):
            parts[-1][1:] = [last]
        else:
            parts.append([low, last] if high else [low])
    return ", ".join(" to ".join(part) for part in parts)


def _follows(before: str, after: str) -> bool:
    """Whether ``after`` is the next release: one more in its last place, or in the one before, from zero."""
    old, new = release(before), release(after) if after else ()
    if len(old) != len(new) or len(old) < 2:
        return False
    return new in ((*old[:-1], old[-1] + 1), (*old[:-2], old[-2] + 1, 0))
