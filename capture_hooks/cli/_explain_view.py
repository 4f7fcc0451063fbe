"""How `capture-hooks explain` shows a report: one table and the findings, nothing cut at any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..diagnosis.explain import Finding, Report, Row, State

_OUTCOME: Final = {"same": "green", "differs": "red", "fails": "red", "unknown": "yellow"}
_SEVERITY: Final = {"wrong": "red", "warning": "yellow", "note": "dim"}
_NORM: Final = {"stream": "un-normed", "embedding": "embedding", "normed": "normed", "module": "a module's"}
_ASKED: Final = {
    "file": "what each engine captures when it reads this file",
    "ids": "what each library captures when it is given these ids under its own key",
    "told": "what each library must be told to capture these states",
}


def show(report: Report, console: Console | None = None) -> None:
    """Print a report, wrapped to the terminal (``COLUMNS``, or 80 where there is none)."""
    console = console or Console(highlight=False)
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterator[RenderableType]:
    layout = f", {report.layout} layout" if report.layout else ""
    facts = [(report.kind, report.subject + layout), ("target", _target(report))]
    trained = report.trained
    facts.append(
        (
            "trained",
            f"{_states(trained.inputs)}\n({trained.by})" if trained.inputs is not None else trained.by,
        )
    )
    facts += [
        (f"  if {reading.convention}", f"{_states(reading.inputs) or reading.refusal} ({_rank(reading)})")
        for reading in trained.candidates
    ]
    yield _grid([(name, Text(value)) for name, value in facts])
    for asked, title in _ASKED.items():
        if rows := [row for row in report.rows if row.asked == asked]:
            yield Text(f"\n{title}:")
            yield _table(rows, trained.by)
    if not report.rows:
        yield Text("\nno engine's reader is installed", style="yellow")
    for finding in report.findings:
        yield _finding(finding)


def _table(rows: Sequence[Row], said: str) -> Table:
    """One row for each engine; the reason that is already ``said`` above is not said again in each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_lines=True)
    for name, share in (("engine", 4), ("captures", 5), ("verdict", 8)):
        table.add_column(name, overflow="fold", ratio=share)
    for row in rows:
        verdict = Text()
        verdict.append(row.verdict.outcome, style=_OUTCOME[row.verdict.outcome])
        verdict.append("".join(f"\n{how}" for how in row.verdict.how if how != said))
        verdict.append("".join(f"\nsilently: {quirk}" for quirk in row.silently), style="dim")
        if row.instead:
            verdict.append(f"\ninstead: {row.instead}")
        found = f"\nreads {row.key} = {list(row.ids)}" if row.key and row.ids is not None else ""
        engine = Text(f"{row.engine}\n{row.versions}")
        engine.append(f"\n{_rank(row)}", style="" if row.rank == "verified" else "yellow")
        captured = "nothing" if row.captured is None else _states(row.captured) or "nothing"
        table.add_row(engine, Text(captured + found), verdict)
    return table


def _finding(finding: Finding) -> RenderableType:
    head = Text()
    head.append(f"\n{finding.severity}", style=_SEVERITY[finding.severity])
    head.append(f" {finding.check}" + (f" ({', '.join(finding.engines)})" if finding.engines else ""))
    lines = [("what", finding.what), ("why", finding.why), ("do", finding.do)]
    if finding.source:
        lines.append(("source", finding.source))
    return Group(head, _grid([(f"  {name}", Text(value)) for name, value in lines]))


def _grid(rows: Sequence[tuple[str, Text]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold", ratio=1)
    for name, value in rows:
        grid.add_row(Text(name), value)
    return grid


def _target(report: Report) -> str:
    target = report.target
    layers = "an unknown number of layers" if target.n_layers is None else f"{target.n_layers} layers"
    return f"{target.family or 'an unknown family'}, {layers} ({target.by})"


def _rank(about: Row | object) -> str:
    rank, day = getattr(about, "rank", ""), getattr(about, "read_on", "")
    return "verified" if rank == "verified" else f"read {day}, never run"


def _states(states: Sequence[State] | None) -> str:
    """Points in order; their norm once where it is the same for all."""
    if not states:
        return ""
    norms = {state.norm for state in states}
    if norms == {"stream"}:
        return ", ".join(state.point for state in states) + " (un-normed)"
    return ", ".join(
        state.point if state.norm == "stream" else f"{state.point} ({_NORM[state.norm]})" for state in states
    ) + (" (the rest un-normed)" if "stream" in norms else "")
