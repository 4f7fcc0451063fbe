"""How `capture-hooks explain` shows a report in a terminal: in short on one screen, or whole, nothing cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..conventions.versions import joined
from ..interop.explain.summary import (
    EARLIER,
    Line,
    Summary,
    meanings,
    not_run,
    shortened,
    slots,
    states_text,
    summary,
)
from ..store.data.pieces import printable

if TYPE_CHECKING:
    from ..interop.explain import Report
    from ..interop.explain.report import Candidate, Finding, Row, Severity, State

#: Lines of the short form, where each has room for 100 characters.
SCREEN: Final = 30
#: Characters of a list of ids to write.
_LIST: Final = 300
#: States named for one engine in the short form.
_SLOTS: Final = 12
#: Stands behind each state that is not what was trained on.
_MARK: Final = "*"
_JUDGED: Final = {"right": "green", "wrong": "bold red", "unknown": "yellow"}

_OUTCOME: Final = {"same": "green", "differs": "red", "fails": "red", "unknown": "yellow"}
_SEVERITY: Final = {"wrong": "red", "warning": "yellow", "note": "dim"}
_NORM: Final = {"embedding": "embedding", "normed": "normed", "module": "a module's"}
_ASKED: Final = {
    "ids": "What each library captures when it is given these ids under its own key:",
    "told": "What each library must be told to capture these states:",
    "file": "What each engine captures when it reads this file:",
}


def show(report: Report, console: Console, engines: Sequence[str] = ()) -> None:
    """Print a report in short: one sentence, then what it rests on, for the engines that are asked for.

    Everything *wrong* that concerns them, or the file itself, is there, if only by name where a screen of
    `SCREEN` lines has no room for more.
    """
    report = _printable(report)
    for part in _short(summary(report, engines), report, console):
        console.print(part)


def show_all(report: Report, console: Console) -> None:
    """Print a report whole, wrapped to the console's width."""
    for part in _parts(_printable(report)):
        console.print(part)


def _printable(report: Report) -> Report:
    """The report without what a terminal would obey: a file's own words may hold anything."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        return printable(value) if isinstance(value, str) else value

    return type(report).from_json(clean(report.to_json()))


def _short(found: Summary, report: Report, console: Console) -> Iterator[RenderableType]:
    word, colon, rest = found.sentence.partition(":")
    judged = {line.judgement for line in found.lines}
    style = _JUDGED[judged.pop()] if len(judged) == 1 else "bold"
    sentence = Text.assemble((word, style), colon, rest)
    below = [*_below(found, report), *_footer(found, report)]
    named = _height(console, *_findings("warning", (), found.warnings))
    room = SCREEN - _height(console, sentence, *below) - named
    # What engines do silently gives way to faults, and warnings to both.
    tables = [
        [_lines_table(found.lines, report, silently)] if found.lines else [] for silently in (True, False)
    ]
    whole = _height(console, *_findings("wrong", found.faults))
    table = tables[_height(console, *tables[0]) + whole > room]
    room -= _height(console, *table)
    faults = _fitting("wrong", found.faults, room, console)
    warnings = _fitting("warning", found.warnings, room + named - _height(console, *faults), console)
    yield from (sentence, *faults, *table, *warnings, *below)


def _height(console: Console, *parts: RenderableType) -> int:
    return sum(len(console.render_lines(part, pad=False)) for part in parts)


def _fitting(
    severity: Severity, findings: Sequence[Finding], room: int, console: Console
) -> list[RenderableType]:
    """As many findings as there is room for, and the names of the others."""
    for shown in range(len(findings), -1, -1):
        parts = _findings(severity, findings[:shown], findings[shown:])
        if _height(console, *parts) <= room:
            return parts
    return parts


def _findings(
    severity: Severity, findings: Sequence[Finding], by_name: Sequence[Finding] = ()
) -> list[RenderableType]:
    lines = [(severity, _in_short(finding)) for finding in findings]
    if by_name:
        times = Counter(finding.check for finding in by_name)
        names = ", ".join(f"{name} ({number})" if number > 1 else name for name, number in times.items())
        lines.append((severity, f"{len(by_name)} {'more' if findings else 'findings'}: {names}"))
    return [_grid(lines, _SEVERITY[severity])] if lines else []


def _in_short(finding: Finding) -> str:
    """What is wrong, for whom, and what to do."""
    said = all(engine in finding.what.lower() for engine in finding.engines)
    engines = "" if said else f" ({', '.join(finding.engines)})"
    do = f": {shortened(finding.do)}" if finding.do else ""
    return f"{shortened(finding.what)}{engines}{do}"


def _lines_table(lines: Sequence[Line], report: Report, silently: bool) -> Table:
    """What each engine feeds beneath what was trained on; what differs has a mark, and is bold."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    table.add_column("engine", overflow="fold")
    table.add_column("feeds", overflow="fold", ratio=2)
    table.add_column("", overflow="fold", ratio=3)
    trained = report.trained
    if trained.inputs is not None:
        whose = "the dump holds" if report.kind == "dump" else "trained on"
        table.add_row(Text(whose), Text(states_text(trained.inputs)), Text(shortened(trained.by), "dim"))
    for line in lines:
        table.add_row(Text(line.name), _fed(line, report), _verdict(line, silently))
    return table


def _fed(line: Line, report: Report) -> Text:
    found = slots(line.row, report.trained.inputs)
    text = Text()
    for index, slot in enumerate(found[:_SLOTS]):
        wrong = slot.right is False
        text.append(", " if index else "")
        text.append(slot.text + _MARK * wrong, style="bold" if wrong else "")
    if len(found) > _SLOTS:
        more = found[_SLOTS:]
        text.append(f" and {len(more)} more" + _MARK * any(slot.right is False for slot in more))
    if found:
        return text
    return Text("nothing" + _MARK, style="bold") if line.row.verdict.outcome == "fails" else Text("unknown")


def _verdict(line: Line, silently: bool) -> Text:
    """The judgement and the name of the difference; why something is unknown stands in the sentence."""
    outcome = line.row.verdict.outcome
    word = {"fails": "stops", "unknown": "unknown"}.get(outcome, line.judgement)
    text = Text.assemble((word, _JUDGED[line.judgement]))
    if outcome == "same" and line.faults:
        text.append(": these states, but see the faults above")
    elif outcome in ("differs", "fails"):
        text.append(f": {shortened('; '.join(line.row.verdict.how))}")
    if read := not_run(line.rows):
        text.append(f"\n{read}", style="dim")
    for quirk in line.row.silently[: 2 * silently]:
        text.append(f"\nsilently: {shortened(quirk)}", style="dim")
    return text


def _below(found: Summary, report: Report) -> Iterator[RenderableType]:
    """What the mark means, what to write, what unknown ids may mean, and which target it is about."""
    states = [slot for line in found.lines for slot in slots(line.row, report.trained.inputs)]
    if any(slot.right is False for slot in states):
        holds = "the dump holds" if report.kind == "dump" else "the head was trained on"
        yield Text(f"{_MARK} not what {holds}")
    means = [
        ("if written for", f"{', '.join(names)}: {states}") for states, names in meanings(report).items()
    ]
    yield _grid([*_to_write(found.lines), *means, ("target", _target(report))])


def _to_write(lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    for line in lines:
        row = line.row
        title, text = "write instead", row.instead
        if row.asked == "told":
            title, text = "write", None if row.ids is None else f"{row.key} = {list(row.ids)}"
        if text is not None:
            yield title, f"{line.engine}: {text if len(text) <= _LIST else 'a long list'}"


def _footer(found: Summary, report: Report) -> Iterator[Text]:
    shown = {row.engine for line in found.lines for row in line.rows}
    more = (
        ["earlier versions and other libraries"]
        if any(row.engine not in shown for row in report.rows)
        else []
    )
    more += ["every finding with its source"] if report.findings else []
    if more:
        yield Text(f"--all shows {', and '.join(more)}", style="dim")


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
    trained = report.trained
    yield report.kind, report.subject + (f" ({report.layout} layout)" if report.layout else "")
    yield "target", _target(report)
    yield "trained", trained.by if trained.inputs is None else f"{_states(trained.inputs)}\n({trained.by})"
    for states, candidates in _alike(trained.candidates):
        yield "", f"{states}, if they are read as by {', '.join(map(_reader, candidates))}"


def _target(report: Report) -> str:
    target = report.target
    layers = "an unknown number of layers" if target.n_layers is None else f"{target.n_layers} layers"
    return f"{target.family or 'an unknown family'}, {layers} ({target.by})"


def _alike(candidates: Sequence[Candidate]) -> Iterator[tuple[str, list[Candidate]]]:
    def states(candidate: Candidate) -> str:
        return (
            _states(candidate.inputs) if candidate.inputs is not None else f"no states: {candidate.refusal}"
        )

    for text, group in groupby(sorted(candidates, key=states), states):
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
        name = EARLIER.sub("", row.engine) if row.asked == "file" else row.engine
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


def _grid(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]], style: str = "") -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(overflow="fold", style=style)
    grid.add_column(overflow="fold", ratio=1)
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    return grid


def _reader(candidate: Candidate) -> str:
    day = "" if candidate.rank == "verified" else f", read {candidate.read_on}, not run"
    return f"{candidate.convention} ({candidate.versions}{day})"


def _states(states: Sequence[State]) -> str:
    """Points in order; their norm once where it is the same for all."""
    if {state.norm for state in states} == {"stream"}:
        return ", ".join(state.point for state in states) + " (un-normed)"
    return ", ".join(
        state.point + (f" ({_NORM[state.norm]})" if state.norm in _NORM else " (un-normed)")
        for state in states
    )
