"""A command contributed by a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A typer-style function under its command name."""

    name: str
    function: Callable[..., None]
    help: str
