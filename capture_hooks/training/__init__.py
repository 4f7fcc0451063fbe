"""From hidden states and tokens to a trained head, on `transformers.Trainer`."""

from importlib.util import find_spec

from ..errors import TrainingError

for _needed in ("transformers", "accelerate"):
    if find_spec(_needed) is None:
        raise TrainingError(f"training needs {_needed}: pip install 'capture-hooks[train]'")

from .config import TrainConfig
from .estimate import CostEstimate
from .objective import Objective
from .run import TrainingInterrupted, run_directory, train
from .trainer import HeadTrainer

__all__ = [
    "CostEstimate",
    "HeadTrainer",
    "Objective",
    "TrainConfig",
    "TrainingInterrupted",
    "run_directory",
    "train",
]
