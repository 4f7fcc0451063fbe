"""One training run from beginning to end, interrupted and resumed as often as needed, and its directory."""

from __future__ import annotations

import functools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers import PrinterCallback

from ..conventions import BUILTIN, Conventions
from ..errors import TrainingError
from ..foreign import parse_json, read_text
from ..heads import make_witness, save_head
from ..heads.checkpoint import HeadFormat
from ..heads.contract import DraftHead
from ..io import replacing
from ..store import Examples
from .build import Data, Setup, prepare
from .callbacks import Averaging, Cadence, Interrupt, Log, Reporter
from .config import TrainConfig
from .objective import Objective
from .optimizers import Progress, WeightAverage, curve, muon_for
from .plan import UNBOUNDED, CostEstimate, arguments, estimate, trainer_arguments
from .trainer import HeadTrainer, checkpoints

SETTINGS: Final = "settings.json"
LOG: Final = "log.jsonl"


class TrainingInterrupted(KeyboardInterrupt):
    """The run was asked to stop; its state is in ``directory``, and ``resume=True`` continues it."""

    def __init__(self, directory: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}; the run's state is in {directory}")
        self.directory, self.step = directory, step


class RunReporter(Reporter, Protocol):
    """Watches a run from its estimate on; called on the first process only."""

    def estimated(self, estimate: CostEstimate) -> None:
        """What the run will cost, before it starts."""
        ...


def train(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    *,
    out: str | Path,
    eval_data: Data | None = None,
    resume: bool = False,
    overwrite: bool = False,
    reporter: RunReporter | None = None,
    now: Callable[[], float] = time.monotonic,
    conventions: Conventions = BUILTIN,
    formats: Sequence[HeadFormat] = (),
) -> DraftHead:
    """Train a draft head for ``model`` and save it.

    Under ``torchrun`` every process calls this; the first one saves.  Checkpoints, the settings and the
    log (JSON lines) lie in `run_directory`, beside the head.

    Args:
        model: the target; its weights are not touched.
        data: a dump of its hidden states, or examples whose states are captured while training.
        config: the settings.
        out: directory of the head.
        eval_data: evaluated instead of a held-out part of ``data``.
        resume: continue the run that ``out`` belongs to; the same data and settings must be given.
        overwrite: replace the head at ``out`` and forget its run.
        reporter: is told the estimate and every logged figure.
        now: the clock that ``max_minutes`` is measured with.
        conventions: what layer ids mean to each engine.
        formats: readers of other libraries' layouts, for a head to start from.

    Returns:
        The trained head, in eval mode.

    Raises:
        TrainingError: for data or settings that cannot be trained with; a loss that is no longer finite.
        TrainingInterrupted: after Ctrl-C or SIGTERM, once the state is saved.
    """
    out = Path(out)
    run = run_directory(out)
    checkpoint = find_checkpoint(out, run, resume, overwrite)
    replace = resume or overwrite
    with undone_unless_begun(run):
        return _train(
            model, data, config, out, run, checkpoint, eval_data, replace, reporter, now, conventions, formats
        )


def _train(
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    out: Path,
    run: Path,
    checkpoint: Path | None,
    eval_data: Data | None,
    replace: bool,
    reporter: RunReporter | None,
    now: Callable[[], float],
    conventions: Conventions,
    formats: Sequence[HeadFormat],
) -> DraftHead:
    first = int(os.environ.get("RANK", "0")) == 0
    setup = prepare(model, data, config, eval_data, conventions, formats)
    settings: dict[str, Any] = {
        "config": config.to_json(),
        "spec": str(setup.head.spec),
        "data": setup.digest,
    }
    settings["clock"] = _clock(data) or _clock(eval_data)
    if checkpoint is not None:
        check_same(run, settings, config)
    args = arguments(config, setup, run)
    steps = args.max_steps
    progress = Progress(
        steps if steps < UNBOUNDED else None,
        config.max_minutes * 60 if config.max_minutes is not None else None,
        now,
    )
    objective = Objective(setup.head)
    average = WeightAverage(objective, config.ema) if config.ema is not None else None
    interrupt = Interrupt()
    cadence = Cadence(
        progress,
        interrupt,
        evaluations=config.evaluations if setup.held_out is not None else 0,
        save_minutes=config.save_minutes,
        save_steps=config.save_steps,
    )
    shape = functools.partial(curve, schedule=config.schedule, warmup=config.warmup, minimum=config.min_lr)
    averaging = [Averaging(average)] if average is not None else []
    with trainer_arguments(config):
        trainer = HeadTrainer(
            objective,
            args=args,
            progress=progress,
            shape=shape,
            batch_tokens=config.batch_tokens,
            make_optimizer=functools.partial(muon_for, setup.head, config)
            if config.optimizer == "muon"
            else None,
            average=average,
            capture=setup.capture,
            train_dataset=setup.train,
            eval_dataset=setup.held_out,
            callbacks=[*averaging, cadence, Log(run / LOG, reporter)],
        )
    trainer.remove_callback(PrinterCallback)
    if average is not None and trainer.is_fsdp_enabled:
        raise TrainingError("a weight average (ema) is not kept under FSDP; train without one")
    if reporter is not None:
        cost = estimate(setup, config, args, objective)
        if first:
            reporter.estimated(cost)

    if first:
        begin(run, settings, fresh=checkpoint is None)
    with trainer_arguments(config), interrupt.listening():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    if cadence.interrupted and progress.fraction < 1:
        raise TrainingInterrupted(run, trainer.state.global_step)
    if average is not None:
        average.swap()
    head = _whole_head(trainer, setup, model, data, config, eval_data, conventions, formats)
    if first:
        witness = make_witness(model, head.spec, setup.witness_tokens)
        dtype = getattr(torch, config.save_dtype)
        save_head(
            head,
            out,
            model=model,
            witness=witness,
            dtype=dtype,
            overwrite=replace,
            conventions=conventions,
        )
    trainer.accelerator.wait_for_everyone()
    return head


def _clock(data: Data | None) -> str | None:
    """The time given to the chat template, where the examples were read in this process."""
    return data.clock if isinstance(data, Examples) else None


def _whole_head(
    trainer: HeadTrainer,
    setup: Setup,
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    eval_data: Data | None,
    conventions: Conventions,
    formats: Sequence[HeadFormat],
) -> DraftHead:
    """The trained head; gathered into a new one where FSDP has left this process a part of it."""
    if not trainer.is_fsdp_enabled:
        return setup.head.eval()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    whole = Objective(prepare(model, data, config, eval_data, conventions, formats).head)
    if state:  # only the first process receives it
        whole.load_state_dict(state, strict=False)
    return whole.head.eval()


def run_directory(out: Path) -> Path:
    """Where the run that makes the head ``out`` keeps its checkpoints, settings and log.

    Raises:
        TrainingError: ``out`` is the root directory, which has nothing beside it.
    """
    place = Path(os.path.abspath(out))
    if not place.name:
        raise TrainingError(f"{out} cannot be the head's directory; name one that can be made")
    return place.with_name(place.name + ".training")


@contextmanager
def undone_unless_begun(run: Path) -> Iterator[None]:
    """Leave no directory behind for a run that fails before its first checkpoint."""
    missing = [path for path in (run, *run.parents) if not os.path.lexists(path)]
    try:
        yield
    except BaseException:
        if missing and not checkpoints(run):
            shutil.rmtree(run, ignore_errors=True)
            for parent in missing[1:]:
                with suppress(OSError):  # something else lies in it by now
                    parent.rmdir()
        raise


def recorded_clock(out: Path) -> str | None:
    """The time given to the chat template when the run of ``out`` began; None where it reads no clock."""
    try:
        recorded = json.loads((run_directory(out) / SETTINGS).read_text(encoding="utf-8")).get("clock")
    except (OSError, ValueError, AttributeError):
        return None  # `check_same` says what is wrong with it
    return recorded if isinstance(recorded, str) else None


def find_checkpoint(out: Path, run: Path, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to continue from; refuses to write over what is there."""
    found = checkpoints(run)
    if resume:
        if not found:
            raise TrainingError(f"nothing to resume: {run} holds no whole checkpoint; start without resume")
        return found[-1]
    if overwrite:
        if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
            raise TrainingError(f"{out} holds something other than a head, which is not overwritten")
        return None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} exists already; choose another place, or overwrite it")
    if found:
        raise TrainingError(
            f"{run} holds an unfinished run (step {found[-1].name.rpartition('-')[2]}); "
            "resume it, or overwrite it"
        )
    return None


def check_same(run: Path, settings: Mapping[str, Any], config: TrainConfig) -> None:
    """Check that the run was begun with these settings, this spec and this data.

    Raises:
        TrainingError: naming what differs, or that the run's settings are missing or damaged.
    """
    try:
        path = run / SETTINGS
        before = parse_json(read_text(path, "the run's settings", TrainingError), str(path), TrainingError)
        config.check_resumes(TrainConfig.from_json(before["config"]))
        same_spec, same_data = before["spec"] == settings["spec"], before["data"] == settings["data"]
    except (KeyError, TypeError, AttributeError) as error:
        raise TrainingError(
            f"{run / SETTINGS} is missing or damaged ({error}); the run cannot be resumed"
        ) from error
    if not same_spec:
        raise TrainingError(
            f"the run in {run} trains on {before['spec']}, but now {settings['spec']} was given"
        )
    if not same_data:
        raise TrainingError(
            f"the run in {run} was started on other data, or the data was divided differently; resume it "
            "with the same, or start a new run from the head itself (init_from)"
        )


def begin(run: Path, settings: Mapping[str, Any], fresh: bool) -> None:
    """Make the run's directory and write its settings; a fresh run forgets the checkpoints that are there.

    Raises:
        TrainingError: the directory cannot be written.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        if fresh:
            for old in checkpoints(run):
                shutil.rmtree(old)
    except OSError as error:
        raise TrainingError(f"cannot write the run's state to {run}: {error.strerror}") from error
    with replacing(run / SETTINGS, TrainingError) as file:
        file.write(json.dumps(settings, indent=2).encode() + b"\n")
