"""What a model's name stands for: a checkpoint, or an adapter of PEFT and its base's checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ModelError

#: PEFT's own name for an adapter's settings (peft 0.21, utils/constants.py).
ADAPTER_CONFIG: Final = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Location:
    """A model as named.

    Attributes:
        name: what was given: a directory or a hub id.
        base: the checkpoint with the configuration and the weights.
        adapter: the directory of the adapter that belongs on top, or None.
    """

    name: str
    base: str
    adapter: str | None


def locate(model: str) -> Location:
    """Look at a directory; any other name is a checkpoint's hub id.

    A directory with both a ``config.json`` and an adapter is its own base, as in transformers.

    Raises:
        ModelError: an adapter that does not say what it was trained on, or whose base is not there.
    """
    directory = Path(model)
    settings = directory / ADAPTER_CONFIG
    if not settings.is_file():
        return Location(model, model, None)
    if (directory / "config.json").is_file():
        return Location(model, model, model)
    try:
        base = json.loads(settings.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"cannot read the adapter's settings {settings}: {error!r}") from None
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"{model} is an adapter that does not say which model it was trained on: set "
            f"base_model_name_or_path in {settings} to that model's directory"
        )
    path = Path(base)
    if (path / ADAPTER_CONFIG).is_file():
        raise ModelError(f"{model} is an adapter of {base}, itself an adapter: merge that one into its base")
    if base.startswith((".", "/", "~")) and not path.is_dir():
        raise ModelError(
            f"{model} is an adapter of {base}, and there is no such directory: set "
            f"base_model_name_or_path in {settings} to where that model lies"
        )
    return Location(model, base, model)
