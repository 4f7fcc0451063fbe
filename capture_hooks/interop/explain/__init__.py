"""What a head, its ids or a dump mean, and what each engine will do with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...errors import HeadError
from ...heads.files import CONFIG
from .checks import findings
from .report import Report, Row
from .rows import of_dump, of_file, of_ids, requested
from .subject import ExplainOptions, Subject, dump_subject, head_subject, ids_subject
from .summary import Summary, concerns, summary
from .trained import Known

__all__ = [
    "ExplainOptions",
    "Known",
    "Report",
    "Summary",
    "agrees",
    "explain",
    "explain_dump",
    "explain_head",
    "explain_ids",
    "summary",
]


def explain(
    directory: str | None, ids: Sequence[int] | None, asked: ExplainOptions, known: Known | None = None
) -> Report:
    """Explain whichever of them is given: a head's directory (with a ``config.json``), a dump's, or ids.

    Raises:
        HeadError, StoreError, ModelError, SpecError, PluginError, ConventionError: as the three functions.
    """
    if directory is None:
        return explain_ids(ids or (), asked, known)
    if (Path(directory) / CONFIG).exists() or not Path(directory).is_dir():
        if ids is not None:
            raise HeadError(f"{directory} has its own config.json; --ids are for bare ids, or for a dump")
        return explain_head(directory, asked, known)
    return explain_dump(directory, ids, asked, known)


def explain_head(
    directory: str,
    asked: ExplainOptions = ExplainOptions(),  # noqa: B008 - immutable
    known: Known | None = None,
) -> Report:
    """Explain a head's directory.

    Raises:
        HeadError, ModelError, SpecError, PluginError: as `head_subject`.
    """
    subject = head_subject(directory, asked, known or Known())
    return _report(subject, of_file(subject.config, subject.facts, subject.trained, subject.known))


def explain_ids(
    ids: Sequence[int],
    asked: ExplainOptions = ExplainOptions(),  # noqa: B008 - immutable
    known: Known | None = None,
) -> Report:
    """Explain bare integers: to each library under its own key, and to each engine that reads the file.

    Raises:
        HeadError, ModelError, SpecError, PluginError, ConventionError: as `ids_subject`.
    """
    subject = ids_subject(ids, asked, known or Known())
    key = next(iter(subject.ids), None)
    rows = of_ids(ids, key, subject.facts, subject.trained, subject.known.conventions)
    if subject.ids:
        rows += of_file(subject.config, subject.facts, subject.trained, subject.known)
    return _report(subject, rows)


def explain_dump(
    directory: str,
    ids: Sequence[int] | None = None,
    asked: ExplainOptions = ExplainOptions(),  # noqa: B008 - immutable
    known: Known | None = None,
) -> Report:
    """Explain a dump: what it holds, and what each engine must be told to feed a head its states.

    Raises:
        StoreError, ModelError, SpecError, PluginError, ConventionError: as `dump_subject`.
    """
    subject = dump_subject(directory, ids, asked, known or Known())
    return _report(subject, of_dump(subject.facts, subject.trained, subject.known.conventions))


def agrees(report: Report, engines: Sequence[str]) -> bool:
    """Whether every requested engine captures what was trained on, and computes what was trained.

    Without engines: whether the file itself has nothing wrong, whatever engines make of it.

    Raises:
        ConventionError: what one of them captures was not established.
    """
    wrong = [finding for finding in report.findings if finding.severity == "wrong"]
    if any(not finding.engines for finding in wrong):
        return False
    for name in engines:
        rows = requested(report.rows, name)
        if any(row.verdict.outcome != "same" for row in rows):
            return False
        concerned = {name for row in rows for name in (row.library, row.engine)}
        if any(concerns(finding, concerned) for finding in wrong):
            return False
    return True


def _report(subject: Subject, rows: tuple[Row, ...]) -> Report:
    return Report(
        kind=subject.kind,
        subject=subject.name,
        layout=None if subject.head is None else subject.head.layout,
        target=subject.facts.target,
        trained=subject.trained.shown,
        rows=rows,
        findings=findings(subject, rows),
    )
