"""From hidden states and tokens to a trained head, on `transformers.Trainer`."""

from ._extras import REQUIRED
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
