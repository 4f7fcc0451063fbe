"""What ``capture-hooks data preview`` found, as one page without scripts or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Final

from ...store.data.pieces import Drawn, drawn
from .._page import as_html as _text
from .._page import document
from ._preview_view import heading, too_long

if TYPE_CHECKING:
    from ...training.preview import Figures, Preview, Shown

_STYLE: Final = """
:root { --learnt: #c8f0d2; --edge: #2da44e; --special: #8250df; --mark: #bc4c00; --bar: #54aeff;
  --over: #e5534b; --warn: #fff3cd; }
@media (prefers-color-scheme: dark) { :root { --learnt: #12412a; --edge: #3fb950; --special: #d2a8ff;
  --mark: #ffa657; --bar: #388bfd; --over: #f85149; --warn: #3b2e00; } }
code { white-space: nowrap; }
.warnings { background: var(--warn); border-radius: .5rem; padding: .5rem 1rem; margin: 1rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .5rem;
  margin: 1rem 0; }
.figures div { background: var(--panel); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .75rem; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr));
  gap: 0 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .75rem .15rem 0; border-bottom: 1px solid var(--line);
  white-space: nowrap; vertical-align: top; }
th { font-weight: 600; }
td.wide { width: 100%; text-align: left; white-space: normal; }
th.wide { text-align: left; }
.bar { display: block; height: .8rem; margin-top: .35rem; background: var(--bar);
  border-radius: .15rem; min-width: 1px; }
.over { background: var(--over); }
.row { border: 1px solid var(--line); border-radius: .5rem; margin: .75rem 0; overflow: hidden; }
.row summary { background: var(--panel); padding: .5rem .75rem; cursor: pointer; }
.row pre { margin: 0; padding: .75rem; white-space: pre-wrap; font: .85rem/1.6 ui-monospace, monospace; }
.t { padding: .1em 0; }
.l { background: var(--learnt); box-shadow: 0 2px 0 var(--edge); }
.s { color: var(--special); font-weight: 600; }
i { color: var(--mark); font-style: normal; opacity: .8; }
#edges:checked ~ .row .t { outline: 1px solid var(--line); }
"""


def page(found: Preview) -> str:
    """The page."""
    return document(found.source, _STYLE, "".join(_body(found)))


def _body(found: Preview) -> Iterator[str]:
    yield f'<h1>{_text(found.source)}</h1><p class="soft">as {_text(found.model)} will learn it</p>\n'
    if found.warnings:
        yield '<div class="warnings">'
        yield "".join(f"<p><b>Warning:</b> {_text(warning)}.</p>" for warning in found.warnings)
        yield "</div>\n"
    yield from _figures(found.figures)
    yield "".join(f'<p class="soft">{_text(note)}</p>' for note in found.notes)
    yield '<div class="tables">'
    yield from _lengths(found.figures)
    yield from _coverage(found.figures)
    yield "</div>\n"
    yield from _left_out(found)
    yield (
        '<h2>Rows</h2><p class="soft"><span class="l">Learnt</span>, <span class="s">special tokens</span>, '
        "<i>signs for what is invisible: ↵ · ⇥ [U+200B]</i>; hover over a token for its id.</p>\n"
        '<input type="checkbox" id="edges"> <label for="edges">show where tokens begin and end</label>\n'
    )
    for shown in found.shown:
        yield from _row(shown, heading(shown, found.figures))


def _figures(found: Figures) -> Iterator[str]:
    yield '<div class="figures">'
    left_out = (
        f"{found.left_out:,} left out ({found.left_out / found.rows:.2%})" if found.left_out else "all used"
    )
    repeated = f"prompts that came before: {found.repeated_prompts:,}"
    yield _figure("rows", f"{found.rows:,}", left_out)
    yield _figure(
        "sequences", f"{found.sequences:,}", repeated if found.repeated_prompts else "no prompt twice"
    )
    yield _figure("tokens", f"{found.tokens:,}", f"median sequence {found.lengths.median:,.0f}")
    share = f"{found.learnt / found.tokens:.1%} of all, {found.distinct:,} different"
    yield _figure("learnt tokens", f"{found.learnt:,}", share)
    yield _figure("longest", f"{found.lengths.longest:,}", found.lengths.longest_place)
    yield "</div>\n"
    yield f"<p>Too long: {_text(too_long(found))}.</p>\n"


def _figure(name: str, value: str, more: str) -> str:
    return f'<div>{name}<b>{value}</b><span class="soft">{_text(more)}</span></div>'


def _lengths(found: Figures) -> Iterator[str]:
    yield '<section><h2>Lengths</h2><table><tr><th>tokens<th>sequences<th class="wide"></tr>'
    most = max(one.sequences for one in found.lengths.bins)
    limit = found.too_long.max_length
    for one in found.lengths.bins:
        over = " over" if limit is not None and one.last > limit else ""
        yield f"<tr><td>{one.first:,}–{one.last:,}<td>{one.sequences:,}"
        yield f'<td class="wide">{_bar(one.sequences / most, over)}</tr>'
    yield "</table></section>"


def _coverage(found: Figures) -> Iterator[str]:
    yield (
        '<section><h2>Draft vocabulary</h2><table><tr><th>tokens<th>of the learnt ones<th class="wide"></tr>'
    )
    for one in found.coverage:
        default = "whole: train's default" if one.default else _bar(one.share)
        yield f'<tr><td>{one.size:,}<td>{one.share:.2%}<td class="wide">{default}</tr>'
    yield "</table></section>"


def _bar(share: float, more: str = "") -> str:
    return f'<span class="bar{more}" style="width: {share:.1%}"></span>' if share else ""


def _left_out(found: Preview) -> Iterator[str]:
    if not found.bad:
        return
    yield (
        '<h2>Rows left out</h2><p class="soft">dump and train stop at the first, unless '
        "<code>--bad-rows skip</code> is given.</p>"
        '<table><tr><th>rows<th class="wide">reason, and the first of them</tr>'
    )
    for bad in found.bad:
        places = f"{_text(bad.reason)}: {_text(', '.join(bad.first))}<br>" if bad.count > 1 else ""
        yield f'<tr><td>{bad.count:,}<td class="wide">{places}{_text(bad.example)}</tr>'
    yield "</table>\n"


def _row(shown: Shown, head: str) -> Iterator[str]:
    yield f'<details class="row" open><summary>row {shown.row} <span class="soft">{_text(head)}</span>'
    yield "</summary>\n<pre>\n"
    for one in drawn(shown.pieces):
        yield _token(one)
    yield "</pre></details>\n"


def _token(one: Drawn) -> str:
    piece = one.piece
    kind = "t" + " l" * piece.learnt + " s" * piece.special
    ids = " ".join(map(str, piece.ids))
    parts = "".join(f"<i>{escape(text)}</i>" if mark else escape(text) for text, mark in one.parts)
    times = f"<i>×{one.times:,}</i>" if one.times > 1 else ""
    return f'<span class="{kind}" title="id {ids} at {piece.start}">{parts}{times}</span>'
