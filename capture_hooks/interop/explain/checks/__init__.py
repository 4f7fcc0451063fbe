"""What besides the layer ids decides whether an engine computes what the head was trained to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ..report import Finding, Row
from ..subject import Subject
from . import (
    architecture,
    attention,
    complete,
    config,
    dumps,
    ids,
    inputs,
    names,
    norms,
    own,
    rope,
    tensors,
    vocabulary,
    weights,
    writers,
)

Check = Callable[[Subject, Sequence[Row]], Iterator[Finding]]

#: In the order in which a report shows them.
CHECKS: Final[tuple[Check, ...]] = (
    ids.check,
    inputs.check,
    architecture.check,
    config.check,
    norms.check,
    writers.check,
    vocabulary.check,
    weights.check,
    names.check,
    complete.check,
    tensors.check,
    attention.check,
    rope.check,
    own.check,
    dumps.check,
)


def findings(subject: Subject, rows: Sequence[Row]) -> tuple[Finding, ...]:
    """Everything that the checks find, the gravest first, otherwise in the order of `CHECKS`."""
    grave = ("wrong", "warning", "note")
    found = [finding for check in CHECKS for finding in check(subject, rows)]
    return tuple(sorted(found, key=lambda finding: grave.index(finding.severity)))
