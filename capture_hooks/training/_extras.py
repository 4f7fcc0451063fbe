"""Says what to install where the extra that training needs is missing; imported before all else here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from ..errors import TrainingError

REQUIRED: Final = ("transformers", "accelerate")

for _name in REQUIRED:
    if find_spec(_name) is None:
        raise TrainingError(f"training needs {_name}: pip install 'capture-hooks[train]'")
