"""What happens between steps: when to evaluate, save and stop, and where the figures go."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import TrainingError
from ..io import replacing
from .optimizers import Progress, WeightAverage


class Interrupt:
    """Ctrl-C or SIGTERM asks for a stop after the current step; a second Ctrl-C stops at once.

    Not under ``torchrun``, which hands on a Ctrl-C that the terminal has already given to every process.
    """

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals inside the block (only the main thread can)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.asked = True

    def asked_anywhere(self) -> bool:
        """Whether any process was asked to stop; all processes must call it together."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return self.asked
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        flag = torch.tensor([int(self.asked)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


class Cadence(TrainerCallback):
    """Evaluates at even shares of the run, saves every so often, stops when it is over or interrupted."""

    def __init__(
        self,
        progress: Progress,
        interrupt: Interrupt,
        *,
        evaluations: int,
        save_minutes: float,
        save_steps: int | None,
    ) -> None:
        self.progress, self.interrupt = progress, interrupt
        self.evaluations, self.save_minutes, self.save_steps = evaluations, save_minutes, save_steps
        self.interrupted = False
        self._evaluated = 0
        self._saved_at = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, or find the place of a resumed run."""
        if state.global_step == 0:
            self.progress.start(0, 0.0)
        self._evaluated = int(self.progress.fraction * self.evaluations)
        self._saved_at = self.progress.elapsed

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Set what the Trainer is to do after this step."""
        over = self.progress.fraction >= 1
        self.interrupted = self.interrupt.asked_anywhere()
        due = int(self.progress.fraction * self.evaluations)
        control.should_evaluate = due > self._evaluated and not self.interrupted
        self._evaluated = due
        if self.save_steps is not None:
            control.should_save = state.global_step % self.save_steps == 0
        else:
            control.should_save = self.progress.elapsed - self._saved_at >= 60 * self.save_minutes
        if over or self.interrupted:
            control.should_save = True
            control.should_training_stop = True
        if control.should_save:
            self._saved_at = self.progress.elapsed
        return control


class Averaging(TrainerCallback):
    """Takes every step's weights into the average, before the step is evaluated or saved."""

    def __init__(self, average: WeightAverage) -> None:
        self.average = average

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Update the average."""
        self.average.update()


class Reporter(Protocol):
    """Watches a run; called on the first process only."""

    def logged(self, values: Mapping[str, float]) -> None:
        """A line of training figures, or an evaluation (its keys begin with ``eval_``)."""
        ...


class Log(TrainerCallback):
    """Appends every figure to a JSON-lines file and hands it to the reporter."""

    def __init__(self, path: Path | None, reporter: Reporter | None) -> None:
        self.path, self.reporter = path, reporter

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget lines of steps that a resumed run will take again."""
        if self.path is None or not state.is_world_process_zero:
            return
        kept = []
        if state.global_step and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the process was killed while it wrote this line
                if entry["step"] <= state.global_step:
                    kept.append(line + "\n")
        with replacing(self.path, TrainingError) as file:
            file.write("".join(kept).encode())

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if logs is None or not state.is_world_process_zero:
            return
        values = {"step": state.global_step, **logs}
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")
        if self.reporter is not None:
            self.reporter.logged(values)
