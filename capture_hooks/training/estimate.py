"""What a run will cost, from one step that is measured before it begins."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .objective import Objective


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
