"""How ``capture-hooks data preview`` shows what it found in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

from ...store.data.pieces import Drawn, drawn, printable

if TYPE_CHECKING:
    from rich.console import Console

    from ...training.preview import Figures, Preview, Shown

#: Longer stretches, learnt or not, are shown by their two ends, of this many characters together.
LONGEST: Final = 1500
_LEARNT: Final = "green"
_CONTEXT: Final = "default"
_SPECIAL: Final = "magenta"
_MARK: Final = "yellow"


def show(found: Preview, console: Console, *, whole: bool = False) -> None:
    """Print it.

    Args:
        found: what was read.
        console: rows are coloured where it has colours; elsewhere brackets stand around what is learnt.
        whole: show long stretches whole.
    """
    coloured = console.is_terminal and not console.no_color and console.color_system is not None
    console.print(_facts([("data", f"{found.source}, for {found.model}"), *(("", n) for n in found.notes)]))
    how = Text("shown     learnt tokens are ")
    how.append("green" if coloured else "in ⟦ ⟧", style=_LEARNT)
    if coloured:
        how.append(", special tokens ")
        how.append("magenta", style=_SPECIAL)
    how.append("; signs for what is invisible: ")
    how.append("↵ · ⇥ [U+200B]", style=_MARK)
    console.print(how)
    for shown in found.shown:
        console.print(Text(f"\nrow {shown.row}  {heading(shown, found.figures)}", "bold"), soft_wrap=True)
        text = row_text(shown, brackets=not coloured, whole=whole)
        console.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")
    console.print()
    console.print(_facts(_figures(found.figures)))
    console.print(_lengths(found.figures))
    console.print(_coverage(found.figures))
    if found.bad:
        console.print(_left_out(found))
    for warning in found.warnings:
        console.print(_facts([("warning", warning)], "yellow"))


def row_text(shown: Shown, *, brackets: bool, whole: bool) -> Text:
    """The text of a sequence."""
    text = Text()
    for learnt, group in groupby(drawn(shown.pieces), lambda one: one.piece.learnt):
        if learnt and brackets:
            text.append("⟦", style=_MARK)
        for one in _shortened(list(group), whole):
            if isinstance(one, str):
                text.append(one, style=_MARK)
                continue
            style = _SPECIAL if one.piece.special else _LEARNT if learnt else _CONTEXT
            for part, mark in one.parts:
                text.append(part, style=_MARK if mark else f"bold {style}" if learnt else style)
            if one.times > 1:
                text.append(f"×{one.times:,}", style=_MARK)
        if learnt and brackets:
            text.append("⟧", style=_MARK)
    return text


def _shortened(run: Sequence[Drawn], whole: bool) -> Iterator[Drawn | str]:
    lengths = [sum(len(part) for part, _ in one.parts) for one in run]
    if whole or sum(lengths) <= LONGEST:
        yield from run
        return
    first, last = 0, len(run)
    left = right = LONGEST // 2
    while left > 0:
        left -= lengths[first]
        first += 1
    while right > 0 and last > first:
        last -= 1
        right -= lengths[last]
    yield from run[:first]
    if last > first:
        yield f" … {sum(lengths[first:last]):,} characters … "
    yield from run[last:]


def _facts(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    grid.add_column(overflow="fold", ratio=1)
    for name, value in rows:
        grid.add_row(Text(name, style=style), Text(printable(value)))
    return grid


def _figures(found: Figures) -> Iterator[tuple[str, str]]:
    left_out = f"; {found.left_out:,} left out ({found.left_out / found.rows:.2%})" if found.left_out else ""
    yield "rows", f"{found.rows:,}{left_out}"
    repeated = ""
    if found.repeated_prompts:
        repeated = f"; prompts that came before: {found.repeated_prompts:,}"
        repeated += f", with the same answer: {found.repeated:,}" if found.repeated else ""
    yield "sequences", f"{found.sequences:,}{repeated}"
    yield "tokens", f"{found.tokens:,}"
    yield (
        "learnt",
        f"{found.learnt:,} ({found.learnt / found.tokens:.1%}); {found.distinct:,} different tokens",
    )
    lengths = found.lengths
    yield (
        "length",
        f"{lengths.shortest:,} to {lengths.longest:,} tokens, median {lengths.median:,.0f}; the longest: "
        f"{lengths.longest_place}",
    )
    yield "too long", too_long(found)


def heading(shown: Shown, found: Figures) -> str:
    """Where a sequence is from, and how long it is."""
    limit, length = found.too_long.max_length, len(shown.token_ids)
    over = f" (longer than {limit:,})" if limit is not None and length > limit else ""
    return f"{printable(shown.place)}: {length:,} tokens{over}, {sum(shown.mask):,} learnt"


def too_long(found: Figures) -> str:
    """What becomes of sequences that are too long."""
    over = found.too_long
    if over.max_length is None:
        return "the model's configuration gives no limit"
    if not over.sequences:
        return f"none is longer than {over.max_length:,} tokens"
    places = ", ".join(over.first) + (", …" if over.sequences > len(over.first) else "")
    return (
        f"{over.sequences:,} longer than {over.max_length:,} tokens ({places}): dump and train refuse them; "
        f"--too-long truncate loses {over.lost_by_cutting / found.learnt:.2%} of the learnt tokens, skip "
        f"{over.lost_by_skipping / found.learnt:.2%}"
    )


def _lengths(found: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column("sequences", justify="right")
    table.add_column("", ratio=1)
    most = max(one.sequences for one in found.lengths.bins)
    limit = found.too_long.max_length
    for one in found.lengths.bins:
        over = limit is not None and one.last > limit
        bar = _bar(one.sequences / most)
        table.add_row(
            f"{one.first:,}-{one.last:,}", f"{one.sequences:,}", Text(bar, style="red" if over else "cyan")
        )
    return table


def _coverage(found: Figures) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("draft vocabulary", justify="right")
    table.add_column("covers of the learnt tokens", justify="right")
    table.add_column("", ratio=1)
    for one in found.coverage:
        name = "whole (train's default)" if one.default else ""
        table.add_row(f"{one.size:,}", f"{one.share:.2%}", name or Text(_bar(one.share), style="cyan"))
    return table


def _bar(share: float) -> str:
    return "█" * round(24 * share) or ("▏" if share else "")


def _left_out(found: Preview) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.title = Text("left out: dump and train stop at the first, unless --bad-rows skip is given", "bold")
    table.add_column("rows", justify="right")
    table.add_column("reason, and the first of them", overflow="fold", ratio=1)
    for bad in found.bad:
        places = f"{printable(bad.reason)}: {printable(', '.join(bad.first))}\n" if bad.count > 1 else ""
        table.add_row(f"{bad.count:,}", Text(places + printable(bad.example)))
    return table
