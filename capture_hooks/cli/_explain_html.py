"""What `capture-hooks explain` found, as one page: engines by slots, then findings, then the history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from ..interop.explain.summary import Judgement, Summary, meanings, not_run, other_lines, slots, summary
from ._page import as_html as _text
from ._page import document

if TYPE_CHECKING:
    from ..interop.explain import Report
    from ..interop.explain.report import Finding, Row, State
    from ..interop.explain.summary import Line

_STYLE: Final = """
:root { --right: #c8f0d2; --right-ink: #0b4a20; --wrong: #ffd7d5; --wrong-ink: #82071e;
  --unknown: #fff3cd; --unknown-ink: #5c4400; }
@media (prefers-color-scheme: dark) { :root { --right: #12412a; --right-ink: #aff5b4; --wrong: #67060c;
  --wrong-ink: #ffdcd7; --unknown: #3b2e00; --unknown-ink: #f8e3a1; } }
.answer { font-size: 1.15rem; border-radius: .5rem; padding: .75rem 1rem; margin: 1rem 0; }
.right { background: var(--right); color: var(--right-ink); }
.wrong { background: var(--wrong); color: var(--wrong-ink); }
.unknown { background: var(--unknown); color: var(--unknown-ink); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: 1rem 0; }
dt { color: var(--soft); }
dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: separate; border-spacing: .2rem; width: 100%; overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-radius: .35rem; }
th { font-weight: 600; white-space: nowrap; }
td.slot { white-space: nowrap; }
td.what { background: var(--panel); min-width: 14rem; overflow-wrap: anywhere; }
td small, th small { display: block; font-weight: normal; }
code { overflow-wrap: anywhere; }
.finding { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; margin: .5rem 0; }
.finding b { border-radius: .35rem; padding: .1rem .4rem; }
summary { cursor: pointer; padding: .5rem 0; }
@media (max-width: 40rem) {
  table, tbody, tr, td, tbody th { display: block; }
  thead { display: none; }
  tr { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; margin: .5rem 0; }
  td { margin: .2rem 0; }
  td.slot { display: inline-block; margin-right: .2rem; }
  td[data-column]::before { content: attr(data-column) ": "; opacity: .75; }
  td.what { min-width: 0; }
  td:empty { display: none; }
}
"""
_SIGN: Final = {True: "✓", False: "✗", None: "?"}
_CLASS: Final[dict[bool | None, Judgement]] = {True: "right", False: "wrong", None: "unknown"}
_SEVERITY: Final = {"wrong": "wrong", "warning": "unknown", "note": "soft"}


def page(report: Report, engines: Sequence[str] = ()) -> str:
    """The page, with the engines that are asked for first.

    Raises:
        ConventionError: as `summary`.
    """
    found = summary(report, engines)
    return document(f"{report.kind} {report.subject}", _STYLE, "".join(_body(found, report)))


def _body(found: Summary, report: Report) -> Iterator[str]:
    yield f"<h1>{_text(report.kind)} {_text(report.subject)}</h1>\n"
    judged = {line.judgement for line in found.lines}
    overall = "right" if found.right else "wrong" if "wrong" in judged or found.faults else "unknown"
    yield f'<p class="answer {overall}">{_text(found.sentence)}</p>\n'
    yield from _facts(report)
    if found.lines:
        yield from _matrix("Engines", found.lines, report)
    if others := other_lines(report, found.lines):
        yield from _matrix("Other libraries", others, report)
    if report.findings:
        yield "<h2>Findings</h2>\n"
        yield "".join(map(_finding, report.findings))
    if report.rows:
        yield from _history(report)


def _facts(report: Report) -> Iterator[str]:
    target, trained = report.target, report.trained
    layers = "an unknown number of layers" if target.n_layers is None else f"{target.n_layers} layers"
    holds = "it holds" if report.kind == "dump" else "trained on"
    yield "<dl>"
    if report.layout:
        yield f"<dt>layout<dd>{_text(report.layout)}"
    family = target.family or "an unknown family"
    yield f"<dt>target<dd>{_text(f'{family}, {layers} ({target.by})')}"
    states = "" if trained.inputs is None else f"{_text(_all(trained.inputs))} "
    yield f'<dt>{holds}<dd>{states}<span class="soft">({_text(trained.by)})</span>'
    for states, names in meanings(report).items():
        yield f"<dt>if written for<dd>{_text(', '.join(names))}: {_text(states)}"
    yield "</dl>\n"


def _matrix(title: str, lines: Sequence[Line], report: Report) -> Iterator[str]:
    """A row for each engine, a column for each state that it feeds or should feed."""
    trained = report.trained.inputs
    fed = [slots(line.row, trained) for line in lines]
    width = max(1, len(trained or ()), *(len(found) for found in fed))
    yield f'<h2>{title}</h2>\n<div class="wide"><table><thead><tr><th>engine'
    yield "".join(f"<th>slot {index}" for index in range(width))
    yield "<th>verdict</tr></thead><tbody>\n"
    if trained is not None:
        yield f"<tr><th>{'the dump holds' if report.kind == 'dump' else 'trained on'}"
        yield "".join(_cell(index, state.point) for index, state in enumerate(trained))
        yield "<td>" * (width - len(trained)) + f'<td class="what">{_text(report.trained.by)}</tr>\n'
    for line, found in zip(lines, fed, strict=True):
        yield f"<tr><th>{_text(line.name)}{_read(line.rows)}"
        for index, slot in enumerate(found):
            more = "" if trained is None or index >= len(trained) else f"not {trained[index].point}"
            note = (more or "not trained on") if slot.right is False else ""
            yield _cell(index, f"{_SIGN[slot.right]} {slot.text}", _CLASS[slot.right], note)
        if not found:
            stops = line.row.verdict.outcome == "fails"
            yield _cell(0, "✗ nothing" if stops else "? unknown", "wrong" if stops else "unknown")
        yield "<td>" * (width - max(1, len(found)))
        yield f'<td class="what">{"<br>".join(_verdict(line, report.trained.by))}</tr>\n'
    yield "</tbody></table></div>\n"


def _cell(index: int, text: str, kind: str = "", note: str = "") -> str:
    more = f"<small>{_text(note)}</small>" if note else ""
    return f'<td class="slot {kind}" data-column="slot {index}">{_text(text)}{more}'


def _verdict(line: Line, said: str) -> Iterator[str]:
    """The judgement and what leads to it; the reason that is already ``said`` is not said again."""
    row = line.row
    faults = f", with {len(line.faults)} of the findings below" if line.faults else ""
    yield f"<b>{line.judgement}</b>{faults}"
    yield from (_text(how) for how in row.verdict.how if how != said)
    yield from (f"silently: {_text(quirk)}" for quirk in row.silently)
    if row.key and row.ids is not None:
        verb = "write" if row.asked == "told" else "reads"
        yield f"{verb} <code>{_text(f'{row.key} = {list(row.ids)}')}</code>"
    if row.instead:
        yield f"write instead: <code>{_text(row.instead)}</code>"


def _finding(finding: Finding) -> str:
    engines = f" ({', '.join(finding.engines)})" if finding.engines else ""
    lines = [("why", finding.why), ("do", finding.do), ("source", finding.source or "")]
    more = "".join(f"<dt>{name}<dd>{_text(value)}" for name, value in lines if value)
    return (
        f'<section class="finding"><b class="{_SEVERITY[finding.severity]}">{finding.severity}</b> '
        f'{_text(finding.what)} <span class="soft">{_text(finding.check + engines)}</span>'
        + (f"<dl>{more}</dl>" if more else "")
        + "</section>\n"
    )


def _history(report: Report) -> Iterator[str]:
    yield "<details><summary>Every library and version</summary>\n"
    if report.trained.candidates:
        yield "<p>What the ids would mean, if they were written for</p><dl>"
        for candidate in report.trained.candidates:
            means = (
                _all(candidate.inputs) if candidate.inputs is not None else f"nothing: {candidate.refusal}"
            )
            yield f"<dt>{_text(f'{candidate.convention} {candidate.versions}')}<dd>{_text(means)}"
        yield "</dl>\n"
    yield '<div class="wide"><table><thead><tr><th>engine<th>asked<th>feeds<th>verdict<th>source</tr></thead>'
    yield "<tbody>\n"
    for row in report.rows:
        fed = "nothing" if row.captured is None else _all(row.captured)
        kind = {"same": "right", "unknown": "unknown"}.get(row.verdict.outcome, "wrong")
        how = "".join(f"<br>{_text(reason)}" for reason in (*row.verdict.how, *row.silently))
        yield (
            f"<tr><th>{_text(row.engine)} {_text(row.versions)}{_read([row])}"
            f'<td data-column="asked">{row.asked}<td data-column="feeds">{_text(fed)}'
            f'<td class="{kind}" data-column="verdict">{row.verdict.outcome}{how}'
            f'<td class="soft" data-column="source">{_text(row.source)}</tr>\n'
        )
    yield "</tbody></table></div></details>\n"


def _read(rows: Sequence[Row]) -> str:
    read = not_run(rows)
    return f'<small class="soft">{_text(read)}</small>' if read else ""


def _all(states: Sequence[State]) -> str:
    return ", ".join(state.point for state in states) or "nothing"
