"""What a dump says of itself, and what it does not say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..report import Finding, Row
from ..subject import Subject


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """Its description: one finding for each fact that the dump, or its library's code, says or leaves out."""
    if subject.dump is None:
        return
    for name, value in subject.dump.says:
        yield Finding(
            check="dump.says",
            severity="note",
            what=f"{name}: {value}",
            why="",
            do="",
        )
    for name, how in subject.dump.silent:
        yield Finding(
            check="dump.silent",
            severity="warning",
            what=f"{name} is not said",
            why="a head trained on the dump takes it for something, and nothing checks it",
            do=f"for capture-hooks convert: {how}",
        )
