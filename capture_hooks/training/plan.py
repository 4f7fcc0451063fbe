"""How long a run is, what it costs, and its settings as `transformers.TrainingArguments`."""

from __future__ import annotations

import dataclasses
import importlib
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from transformers import TrainingArguments

from ..errors import TrainingError
from ..foreign import calling
from ..settings import check_names
from .build import Setup
from .config import TrainConfig
from .data import pack
from .objective import Objective
from .sampler import global_batches, split, steps_for

#: Steps of a run that time alone bounds: more than it can take.
UNBOUNDED: Final = 2**31 - 1
#: More passes over the data within one step than this are taken for a mistake.
_MOST_PASSES: Final = 1000
#: Fields of `TrainingArguments`.
_FIELDS: Final = frozenset(field.name for field in dataclasses.fields(TrainingArguments) if field.init)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Figures known, or measured, before training starts.

    Attributes:
        sequences, tokens: of the training side, after the split.
        held_out_sequences: kept for evaluation.
        steps: optimiser steps, as far as the settings or the time budget say.
        passes: how often the training side is seen in these steps.
        seconds_per_step: of one measured step of this process.
        minutes: the whole run's probable time.
        parameters: trained parameters.
        memory_bytes: peak memory of this process (of its GPU, if any) with the optimiser's state.
        draft_vocab: tokens the head can draft.
        coverage, held_out_coverage: share of the supervised tokens inside the draft vocabulary.
    """

    sequences: int
    tokens: int
    held_out_sequences: int
    steps: int
    passes: float
    seconds_per_step: float
    minutes: float
    parameters: int
    memory_bytes: int
    draft_vocab: int
    coverage: float
    held_out_coverage: float | None


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured forward and backward pass."""

    seconds: float
    memory_bytes: int
    parameters: int


def probe(
    objective: Objective, batch: Callable[[], Mapping[str, Tensor]], autocast: torch.dtype | None
) -> Probe:
    """Time one step without taking it: weights, gradients and random state are as before.

    On a GPU the first pass, which loads kernels, is not the one measured.
    """
    device = next(objective.parameters()).device
    devices = [device] if device.type == "cuda" else []
    trained = [p for p in objective.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=devices):
        if devices:
            _step(objective, batch(), autocast)
            torch.cuda.reset_peak_memory_stats(device)
        started = time.perf_counter()
        _step(objective, batch(), autocast)
        seconds = time.perf_counter() - started
    objective.zero_grad(set_to_none=True)
    adam = 2 * sum(p.numel() * p.element_size() for p in trained)
    if devices:
        memory = torch.cuda.max_memory_allocated(device)
    else:  # kilobytes on Linux, bytes on macOS
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    return Probe(seconds, memory + adam, sum(p.numel() for p in trained))


def _step(objective: Objective, batch: Mapping[str, Tensor], autocast: torch.dtype | None) -> None:
    device = next(objective.parameters()).device
    objective.train()
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        sums = objective(**batch)
    (sums["factors"] * sums["loss"]).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def arguments(config: TrainConfig, setup: Setup, run: Path) -> TrainingArguments:
    """The settings as the Trainer takes them, ``trainer_args`` included; ``max_steps`` is the run's length.

    Raises:
        TrainingError: ``trainer_args`` that are settings of their own or that transformers refuses, a
            ``report_to`` that is not installed, or a step of more than a thousand passes over the data.
    """
    settings: dict[str, Any] = {
        "output_dir": str(run),
        "max_steps": 1,  # until `_steps` is known, which needs the number of processes
        "learning_rate": config.lr,
        "seed": config.seed,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        "max_grad_norm": config.max_grad_norm,
        "gradient_accumulation_steps": config.accumulate,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
    }
    if taken := sorted(settings.keys() & config.trainer_args.keys()):
        raise TrainingError(f"trainer_args must not set {', '.join(taken)}: these are settings of their own")
    check_names("transformers.TrainingArguments", config.trainer_args, _FIELDS, TrainingError)
    _check_passes(config, setup)
    device = next(setup.anatomy.lm_head.parameters()).device
    defaults: dict[str, Any] = {
        "use_cpu": device.type == "cpu",
        "per_device_train_batch_size": 1,
        "logging_steps": config.log_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",  # `Cadence` says when
        "save_strategy": "no",
        "report_to": _reporters(config.report_to),
        "disable_tqdm": True,
        "dataloader_num_workers": config.workers,
        "dataloader_pin_memory": device.type == "cuda",
        "ddp_broadcast_buffers": False,  # the head's buffers are the target's own rows, and constant
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,
    }
    with trainer_arguments(config):
        args = TrainingArguments(**settings, **defaults | dict(config.trainer_args))
    args.max_steps = _steps(config, setup, args.world_size)
    args._n_gpu = min(args.n_gpu, 1)  # one process drives one device; more of them under torchrun
    return args


@contextmanager
def trainer_arguments(config: TrainConfig) -> Iterator[None]:
    """Where transformers uses ``trainer_args``, whose values it alone can judge.

    Raises:
        TrainingError: naming them, for what it raises.
    """
    given = ", ".join(f"{name}={value!r}" for name, value in config.trainer_args.items())
    with calling(f"transformers cannot train with {given}", TrainingError) if given else nullcontext():
        yield


def _reporters(name: str) -> list[str]:
    """The integrations that ``report_to`` names, each tried out.

    Raises:
        TrainingError: transformers knows none of that name, or what it needs is not installed.
    """
    integrations: Any = importlib.import_module("transformers.integrations")  # it has no types
    names = [] if name == "none" else [name]
    if name == "all":
        names = list(integrations.get_available_reporting_integrations())
    with calling(f"cannot report to {name!r}", TrainingError):
        for callback in integrations.get_reporting_integration_callbacks(names):
            callback()
    return names


def _check_passes(config: TrainConfig, setup: Setup) -> None:
    """A step that sees all data again and again learns no more, and its batch may not fit into memory.

    Raises:
        TrainingError: where one step is that long.
    """
    tokens = sum(setup.train.lengths)
    if config.batch_tokens > _MOST_PASSES * tokens:
        raise TrainingError(
            f"batch_tokens={config.batch_tokens} is more than {_MOST_PASSES} passes over the {tokens} tokens "
            "to train on in one step; give less, or more data"
        )


def _steps(config: TrainConfig, setup: Setup, world: int) -> int:
    limits = [config.steps] if config.steps is not None else []
    if config.epochs is not None:
        parts = config.accumulate * world
        most = config.steps or UNBOUNDED
        lengths = setup.train.lengths
        limits.append(steps_for(lengths, config.batch_tokens, config.seed, config.epochs, parts, most))
    return min(limits, default=UNBOUNDED)


def estimate(
    setup: Setup, config: TrainConfig, args: TrainingArguments, objective: Objective
) -> CostEstimate:
    """What the run will cost, from one step that is measured and not taken."""
    parts = config.accumulate * args.world_size
    lengths = setup.train.lengths
    batch = next(global_batches(lengths, config.batch_tokens, config.seed, parts))
    device = args.device

    def first_share() -> dict[str, Tensor]:
        share = split(batch, lengths, parts)[args.process_index]
        tensors = send_to_device(pack([setup.train[i] for i in share]), device)
        return setup.capture(tensors) if setup.capture is not None and "states" not in tensors else tensors

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
