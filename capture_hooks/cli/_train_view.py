"""What `capture-hooks train` shows: the estimate, a progress line, and held-out acceptance."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..training.plan import CostEstimate


class TrainView:
    """Prints a run to the terminal; lines alone where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, markup=False)
        self._last: Mapping[str, float] = {}
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
        )
        self._task = self._bar.add_task("train", total=1.0, figures="", start=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar.live.is_started:  # else it would leave an empty line
            self._bar.stop()

    def estimated(self, estimate: CostEstimate) -> None:
        """The cost, before the first step."""
        held_out = (
            f" ({estimate.held_out_coverage:.1%} of the held-out ones)" if estimate.held_out_coverage else ""
        )
        self.console.print(
            f"data    {estimate.sequences:,} sequences, {estimate.tokens:,} tokens; "
            f"{estimate.held_out_sequences:,} sequences held out\n"
            f"head    {estimate.parameters:,} trained parameters; drafts {estimate.draft_vocab:,} tokens, "
            f"which cover {estimate.coverage:.1%} of those to learn{held_out}\n"
            f"cost    about {_minutes(estimate.minutes)}: {estimate.steps:,} steps of "
            f"{estimate.seconds_per_step:.3g} s (measured), {estimate.passes:.3g} passes over the data; "
            f"{estimate.memory_bytes / 2**30:.2g} GiB of memory"
        )
        self._bar.start()
        self._bar.start_task(self._task)

    def logged(self, values: Mapping[str, float]) -> None:
        """One line of figures, or an evaluation."""
        self._bar.update(self._task, completed=values.get("progress", 0.0))
        if "eval_loss" in values:
            accepted = by_position(values, "eval_acceptance_")
            self.console.print(
                f"step {values['step']:,}: held-out acceptance {' '.join(f'{a:.3f}' for a in accepted)}, "
                f"loss {values['eval_loss']:.3f}"
            )
            self._last = dict(values)
        elif "acceptance_1" in values:
            figures = (
                f"step {values['step']:,} loss {values['loss_1']:.3f} acceptance {values['acceptance_1']:.3f}"
            )
            self._bar.update(self._task, figures=figures)
            if not self.console.is_terminal:
                self.console.print(f"{figures} ({values['progress']:.0%})")

    def table(self) -> Table | None:
        """The last evaluation: acceptance and loss per draft position."""
        if not self._last:
            return None
        table = Table(
            "draft position", "held-out acceptance", "loss", title="teacher-forced, on held-out prompts"
        )
        losses = by_position(self._last, "eval_loss_")
        for position, accepted in enumerate(by_position(self._last, "eval_acceptance_")):
            table.add_row(str(position + 1), f"{accepted:.3f}", f"{losses[position]:.3f}")
        return table


def by_position(values: Mapping[str, float], prefix: str) -> list[float]:
    """The figures ``prefix``1, ``prefix``2, ... in order."""
    found: list[float] = []
    while (name := f"{prefix}{len(found) + 1}") in values:
        found.append(values[name])
    return found


def _minutes(minutes: float) -> str:
    return f"{minutes * 60:.0f} seconds" if minutes < 2 else f"{minutes:.0f} minutes"
