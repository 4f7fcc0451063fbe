"""What a head says of itself: its capture section, and fields that no reader could make sense of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ....errors import HeadError
from ....heads.consistency import check_section
from ..report import Finding, Row
from ..subject import Subject


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """The section against the file and against the target given, and its statements on engines."""
    if subject.head is None:
        return
    for problem in subject.head.problems:
        yield Finding(
            check="own.field",
            severity="wrong",
            what=problem,
            why="readers take such a value as it stands, or for another",
            do="correct it in config.json",
        )
    section = subject.head.section
    if section is None:
        return
    try:
        where = str(subject.head.directory)
        check_section(subject.config, section, where, conventions=subject.known.conventions)
    except HeadError as error:
        yield Finding(
            check="own.section",
            severity="wrong",
            what="the capture section and the file disagree",
            why=str(error),
            do="save the head again with save_head",
        )
    for statement in section.engines:
        if not statement.right:
            yield Finding(
                check="own.excluded",
                severity="wrong",
                engines=(statement.engine,),
                what=f"the head excludes {statement.engine} {statement.versions}",
                why="; ".join(statement.excluded),
                do="serve it with an engine that it does not exclude",
            )
    ours, theirs = subject.facts.target, section.target
    for name, here, there in (
        ("layers", ours.n_layers, theirs.n_layers),
        ("width", ours.hidden_size, theirs.hidden_size),
        ("vocabulary", ours.vocab_size, theirs.vocab_size),
    ):
        if here is not None and here != there:
            yield Finding(
                check="own.target",
                severity="wrong",
                what=f"the target given has {name} {here}, and the head was trained on one with {there}",
                why="it belongs to another target",
                do="give the target that the head was trained on",
            )
