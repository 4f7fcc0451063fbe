"""From hidden states and tokens to a trained head, on `transformers.Trainer`."""

from importlib import import_module
from typing import TYPE_CHECKING

from ._extras import REQUIRED

if TYPE_CHECKING:
    from .config import TrainConfig
    from .estimate import CostEstimate
    from .objective import Objective
    from .run import TrainingInterrupted, train
    from .rundir import recorded_clock, run_directory
    from .trainer import HeadTrainer

__all__ = [
    "REQUIRED",
    "CostEstimate",
    "HeadTrainer",
    "Objective",
    "TrainConfig",
    "TrainingInterrupted",
    "recorded_clock",
    "run_directory",
    "train",
]

_HOMES = {
    "CostEstimate": "estimate",
    "HeadTrainer": "trainer",
    "Objective": "objective",
    "TrainConfig": "config",
    "TrainingInterrupted": "run",
    "recorded_clock": "rundir",
    "run_directory": "rundir",
    "train": "run",
}


def __getattr__(name: str) -> object:
    # The trainer pulls in accelerate and peft, which take seconds; a look at data needs neither.
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
