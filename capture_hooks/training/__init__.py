"""From hidden states and tokens to a trained head, on `transformers.Trainer`."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import TrainingError
from .config import TrainConfig

if TYPE_CHECKING:
    from .objective import Objective
    from .plan import CostEstimate
    from .run import TrainingInterrupted, recorded_clock, run_directory, train
    from .trainer import HeadTrainer

__all__ = [
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
    "CostEstimate": "plan",
    "HeadTrainer": "trainer",
    "Objective": "objective",
    "TrainingInterrupted": "run",
    "recorded_clock": "run",
    "run_directory": "run",
    "train": "run",
}


def __getattr__(name: str) -> object:
    # The trainer pulls in accelerate and peft, which take seconds; settings and a look at data need neither.
    if name in _HOMES:
        for library in ("transformers", "accelerate"):
            if find_spec(library) is None:
                raise TrainingError(f"training needs {library}: pip install 'capture-hooks[train]'")
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
