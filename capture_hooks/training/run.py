"""One training run from beginning to end, interrupted and resumed as often as needed."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, TrainingArguments

from ..errors import TrainingError
from ..heads import make_witness, save_head
from ..heads.contract import DraftHead
from .build import Data, Setup, prepare
from .callbacks import Averaging, Cadence, Interrupt, Log, Reporter
from .config import TrainConfig
from .data import pack
from .ema import WeightAverage
from .estimate import CostEstimate, probe
from .objective import Objective
from .sampler import global_batches, split, steps_for
from .schedule import Progress, curve
from .trainer import HeadTrainer, checkpoints, sync

SETTINGS: Final = "settings.json"
LOG: Final = "log.jsonl"
#: Steps of a run that time alone bounds: more than it can take.
_UNBOUNDED: Final = 2**31 - 1
_OWN: Final = frozenset({"output_dir", "max_steps", "learning_rate", "seed", "bf16", "fp16", "max_grad_norm",
                         "gradient_accumulation_steps", "weight_decay", "adam_beta1", "adam_beta2"})  # fmt: skip


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


def run_directory(out: Path) -> Path:
    """Where the run that makes the head ``out`` keeps its checkpoints, settings and log."""
    return out.with_name(out.name + ".training")


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

    Returns:
        The trained head, in eval mode.

    Raises:
        TrainingError: for data or settings that cannot be trained with; a loss that is no longer finite.
        TrainingInterrupted: after Ctrl-C or SIGTERM, once the state is saved.
    """
    out = Path(out)
    run = run_directory(out)
    first = int(os.environ.get("RANK", "0")) == 0
    checkpoint = _checkpoint(out, run, resume, overwrite)
    setup = prepare(model, data, config, eval_data)
    settings = {"config": config.to_json(), "spec": str(setup.head.spec), "data": setup.digest}
    if checkpoint is not None:
        _check_same(run, settings, config)
    args = _arguments(config, setup, run)
    if first:
        _begin(run, settings, fresh=checkpoint is None)

    steps = args.max_steps
    progress = Progress(
        steps if steps < _UNBOUNDED else None,
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
    trainer = HeadTrainer(
        objective,
        args=args,
        progress=progress,
        shape=functools.partial(curve, schedule=config.schedule, warmup=config.warmup, minimum=config.min_lr),
        batch_tokens=config.batch_tokens,
        average=average,
        capture=setup.capture,
        train_dataset=setup.train,
        eval_dataset=setup.held_out,
        callbacks=[*([Averaging(average)] if average is not None else []), cadence, Log(run / LOG, reporter)],
    )
    trainer.remove_callback(PrinterCallback)
    if average is not None and trainer.is_fsdp_enabled:
        raise TrainingError("a weight average (ema) is not kept under FSDP; train without one")
    if reporter is not None:
        estimate = _estimate(setup, config, args, objective)
        if first:
            reporter.estimated(estimate)

    with interrupt.listening():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    if cadence.interrupted and progress.fraction < 1:
        raise TrainingInterrupted(run, trainer.state.global_step)
    if average is not None:
        average.swap()
    head = _whole_head(trainer, setup, model, data, config, eval_data)
    if first:
        witness = make_witness(model, head.spec, setup.witness_tokens)
        save_head(head, out, model=model, witness=witness, overwrite=resume or overwrite)
    trainer.accelerator.wait_for_everyone()
    return head


def _checkpoint(out: Path, run: Path, resume: bool, overwrite: bool) -> Path | None:
    """The checkpoint to continue from; refuses to write over what is there."""
    found = checkpoints(run)
    if resume:
        if not found:
            raise TrainingError(f"nothing to resume: {run} holds no whole checkpoint; start without resume")
        return found[-1]
    if overwrite:
        return None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainingError(f"{out} exists already; choose another place, or overwrite it")
    if found:
        raise TrainingError(
            f"{run} holds an unfinished run (step {found[-1].name.rpartition('-')[2]}); resume it, or overwrite it"
        )
    return None


def _check_same(run: Path, settings: Mapping[str, Any], config: TrainConfig) -> None:
    try:
        before = json.loads((run / SETTINGS).read_text(encoding="utf-8"))
        config.check_resumes(TrainConfig.from_json(before["config"]))
        same_spec, same_data = before["spec"] == settings["spec"], before["data"] == settings["data"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{run / SETTINGS} is missing or damaged ({error}); the run cannot be resumed"
        ) from error
    if not same_spec:
        raise TrainingError(
            f"the run in {run} trains on {before['spec']}, but now {settings['spec']} was given"
        )
    if not same_data:
        raise TrainingError(
            f"the run in {run} was started on other data, or the data was divided differently; resume it with the "
            "same, or start a new run from the head itself (init_from)"
        )


def _begin(run: Path, settings: Mapping[str, Any], fresh: bool) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        if fresh:
            for old in checkpoints(run):
                shutil.rmtree(old)
        aside = run / (SETTINGS + ".writing")
        aside.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        sync(aside)
        os.replace(aside, run / SETTINGS)
    except OSError as error:
        raise TrainingError(f"cannot write the run's state to {run}: {error.strerror}") from error


def _arguments(config: TrainConfig, setup: Setup, run: Path) -> TrainingArguments:
    if taken := sorted(_OWN & set(config.trainer_args)):
        raise TrainingError(f"trainer_args must not set {', '.join(taken)}: these are settings of their own")
    device = next(setup.anatomy.lm_head.parameters()).device
    values: dict[str, Any] = {
        "output_dir": str(run),
        "learning_rate": config.lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "max_grad_norm": config.max_grad_norm,
        "gradient_accumulation_steps": config.accumulate,
        "seed": config.seed,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "use_cpu": device.type == "cpu",
        "per_device_train_batch_size": 1,
        "logging_steps": config.log_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",  # `Cadence` says when
        "save_strategy": "no",
        "report_to": config.report_to,
        "disable_tqdm": True,
        "dataloader_num_workers": config.workers,
        "dataloader_pin_memory": device.type == "cuda",
        "ddp_broadcast_buffers": False,  # the head's buffers are the target's own rows, and constant
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
    } | dict(config.trainer_args)
    args = TrainingArguments(max_steps=1, **values)
    args.max_steps = _steps(config, setup, args.world_size)
    args._n_gpu = min(args.n_gpu, 1)  # one process drives one device; more of them under torchrun
    return args


def _steps(config: TrainConfig, setup: Setup, world: int) -> int:
    limits = [config.steps] if config.steps is not None else []
    if config.epochs is not None:
        parts = config.accumulate * world
        limits.append(steps_for(setup.train.lengths, config.batch_tokens, config.seed, config.epochs, parts))
    return min(limits, default=_UNBOUNDED)


def _estimate(
    setup: Setup, config: TrainConfig, args: TrainingArguments, objective: Objective
) -> CostEstimate:
    parts = config.accumulate * args.world_size
    lengths = setup.train.lengths
    batch = next(global_batches(lengths, config.batch_tokens, config.seed, parts))
    device = args.device

    def first_share() -> dict[str, Tensor]:
        share = split(batch, lengths, parts)[args.process_index]
        tensors = {name: tensor.to(device) for name, tensor in pack([setup.train[i] for i in share]).items()}
        return tensors if setup.capture is None else setup.capture(tensors)

    autocast = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
    measured = probe(objective, first_share, autocast)
    per_step = measured.seconds * config.accumulate
    tokens = sum(lengths)
    minutes = args.max_steps * per_step / 60
    if config.max_minutes is not None:
        minutes = min(minutes, config.max_minutes)
    steps = min(args.max_steps, math.ceil(minutes * 60 / per_step))
    return CostEstimate(
        sequences=len({piece.sequence for piece in setup.train.pieces}),
        tokens=tokens,
        held_out_sequences=len({p.sequence for p in setup.held_out.pieces})
        if setup.held_out is not None
        else 0,
        steps=steps,
        passes=steps * min(config.batch_tokens, tokens) / tokens,
        seconds_per_step=per_step,
        minutes=minutes,
        parameters=measured.parameters,
        memory_bytes=measured.memory_bytes,
        draft_vocab=len(setup.head.draft_token_ids),
        coverage=setup.coverage,
        held_out_coverage=setup.held_out_coverage,
    )


def _whole_head(
    trainer: HeadTrainer,
    setup: Setup,
    model: nn.Module,
    data: Data,
    config: TrainConfig,
    eval_data: Data | None,
) -> DraftHead:
    """The trained head; gathered into a new one where FSDP has left this process a part of it."""
    if not trainer.is_fsdp_enabled:
        return setup.head.eval()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    whole = Objective(prepare(model, data, config, eval_data).head)
    if state:  # only the first process receives it
        whole.load_state_dict(state, strict=False)
    return whole.head.eval()
