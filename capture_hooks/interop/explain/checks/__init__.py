"""What besides the layer ids decides whether an engine computes what the head was trained to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ...dumps import DumpDescription
from ..report import Finding, Row
from ..subject import HeadSubject, Subject
from .config import (
    check_architecture,
    check_attention,
    check_config,
    check_norms,
    check_own,
    check_rope,
    check_writers,
)
from .ids import check_ids, check_inputs
from .tensors import check_complete, check_names, check_tensors, check_weights
from .vocabulary import check_vocabulary

#: What is looked at in a head, beside its ids and inputs, in the order in which a report shows it.
_HEAD: Final[tuple[Callable[[HeadSubject], Iterator[Finding]], ...]] = (
    check_architecture,
    check_config,
    check_norms,
    check_writers,
    check_vocabulary,
    check_weights,
    check_names,
    check_complete,
    check_tensors,
    check_attention,
    check_rope,
    check_own,
)


def findings(subject: Subject, rows: Sequence[Row]) -> tuple[Finding, ...]:
    """Everything that the checks find, the gravest first, otherwise in their order."""
    grave = ("wrong", "warning", "note")
    found = list(check_ids(subject))
    if isinstance(subject, HeadSubject):
        found += check_inputs(subject, rows)
        found += [finding for check in _HEAD for finding in check(subject)]
    if subject.dump is not None:
        found += _described(subject.dump)
    return tuple(sorted(found, key=lambda finding: grave.index(finding.severity)))


def _described(dump: DumpDescription) -> Iterator[Finding]:
    """One finding for each fact that the dump, or its library's code, says or leaves out."""
    for name, value in dump.says:
        yield Finding(check="dump.says", severity="note", what=f"{name}: {value}", why="", do="")
    for name, how in dump.silent:
        yield Finding(
            check="dump.silent",
            severity="warning",
            what=f"{name} is not said",
            why="a head trained on the dump takes it for something, and nothing checks it",
            do=f"for capture-hooks convert: {how}",
        )
