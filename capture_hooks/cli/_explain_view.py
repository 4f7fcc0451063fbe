"""How `capture-hooks explain` shows a report: a table and the findings, wrapped, nothing cut at any width."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..conventions.versions import joined

if TYPE_CHECKING:
    from ..interop.explain import Finding, Report, Row, State
    from ..interop.explain.report import Reading

_OUTCOME: Final = {"same": "green", "differs": "red", "fails": "red", "unknown": "yellow"}
_SEVERITY: Final = {"wrong": "red", "warning": "yellow", "note": "dim"}
_NORM: Final = {"embedding": "embedding", "normed": "normed", "module": "a module's"}
#: What tells the readers of an engine's earlier versions from the newest: ``vllm.v1-0.22``.
_LATER: Final = re.compile(r"-\d+(?:\.\d+)*$")
_ASKED: Final = {
    "ids": "What each library captures when it is given these ids under its own key:",
    "told": "What each library must be told to capture these states:",
    "file": "What each engine captures when it reads this file:",
}


def show(report: Report, console: Console | None = None) -> None:
    """Print a report, wrapped to the terminal (``COLUMNS``, or 80 where there is none)."""
    console = console or Console(highlight=False)
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterator[RenderableType]:
    yield _grid(_facts(report))
    for asked, title in _ASKED.items():
        if rows := [row for row in report.rows if row.asked == asked]:
            yield Text(f"\n{title}")
            yield _table(rows, report.trained.by)
            yield from _keys(rows)
    if not report.rows:
        yield Text(
            "\nWhat engines capture cannot be known without the target: --target, or --family and --layers."
        )
    for finding in report.findings:
        yield _finding(finding)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield report.kind, report.subject + (f" ({report.layout} layout)" if report.layout else "")
    target, trained = report.target, report.trained
    layers = "an unknown number of layers" if target.n_layers is None else f"{target.n_layers} layers"
    yield "target", f"{target.family or 'an unknown family'}, {layers} ({target.by})"
    yield "trained", trained.by if trained.inputs is None else f"{_states(trained.inputs)}\n({trained.by})"
    for states, readings in _alike(trained.candidates):
        yield "", f"{states}, if they are read as by {', '.join(map(_reader, readings))}"


def _alike(readings: Sequence[Reading]) -> Iterator[tuple[str, list[Reading]]]:
    def states(reading: Reading) -> str:
        return _states(reading.inputs) if reading.inputs is not None else f"no states: {reading.refusal}"

    for text, group in groupby(sorted(readings, key=states), states):
        yield text, list(group)


def _table(rows: Sequence[Row], said: str) -> Table:
    """One line for each thing that happens; the reason that is already ``said`` is not said again."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_lines=True)
    for name, share in (("engine", 9), ("captures", 8), ("verdict", 11)):
        table.add_column(name, overflow="fold", ratio=share)
    for group in _merged(rows):
        row, engine = group[0], Text("\n").join(_engines(group))
        verdict = Text(row.verdict.outcome, style=_OUTCOME[row.verdict.outcome])
        verdict.append("".join(f"\n{how}" for how in row.verdict.how if how != said), style="default")
        verdict.append("".join(f"\nsilently: {quirk}" for quirk in row.silently), style="dim")
        captured = "nothing" if row.captured is None else _states(row.captured) or "nothing"
        table.add_row(engine, Text(captured), verdict)
    return table


def _merged(rows: Sequence[Row]) -> list[list[Row]]:
    """Neighbours of one library to which the same happens."""

    def content(row: Row) -> tuple[object, ...]:
        return row.library, row.captured, row.verdict, row.silently

    return [list(group) for _, group in groupby(rows, content)]


def _engines(group: Sequence[Row]) -> Iterator[Text]:
    """One line for the versions of an engine that are known in one way: their ranges end to end.

    Conventions keep the names by which ``--written-for`` takes them.
    """

    def kind(row: Row) -> tuple[str, str, str]:
        name = _LATER.sub("", row.engine) if row.asked == "file" else row.engine
        return name, row.rank, row.read_on

    for (name, rank, day), rows in groupby(group, kind):
        text = Text(f"{name} {joined([row.versions for row in rows])}")
        if rank != "verified":
            text.append(f"\nread {day}, not run", style="yellow")
        yield text


def _keys(rows: Sequence[Row]) -> Iterator[RenderableType]:
    """Where ids are read from, and what to write instead: too long for the table's columns."""
    reads = {f"{row.library}: {row.key} = {list(row.ids)}" for row in rows if row.key and row.ids is not None}
    instead = {f"{row.library}: {row.instead}" for row in rows if row.instead and row.newest}
    lines = [("read from", "\n".join(sorted(reads)))] if reads else []
    lines += [("write instead", "\n".join(sorted(instead)))] if instead else []
    yield _grid(lines)


def _finding(finding: Finding) -> RenderableType:
    head = Text(f"\n{finding.severity}", style=_SEVERITY[finding.severity])
    engines = f" ({', '.join(finding.engines)})" if finding.engines else ""
    head.append(f" {finding.check}{engines}", style="default")
    if not finding.why:
        head.append(f": {finding.what}", style="default")
        return head
    lines = [("  what", finding.what), ("  why", finding.why), ("  do", finding.do)]
    lines.append(("  source", finding.source or ""))
    return Group(head, _grid([(name, value) for name, value in lines if value]))


def _grid(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold", ratio=1)
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    return grid


def _reader(reading: Reading) -> str:
    day = "" if reading.rank == "verified" else f", read {reading.read_on}, not run"
    return f"{reading.convention} ({reading.versions}{day})"


def _states(states: Sequence[State]) -> str:
    """Points in order; their norm once where it is the same for all."""
    if {state.norm for state in states} == {"stream"}:
        return ", ".join(state.point for state in states) + " (un-normed)"
    return ", ".join(
        state.point + (f" ({_NORM[state.norm]})" if state.norm in _NORM else " (un-normed)")
        for state in states
    )
