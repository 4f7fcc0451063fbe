"""A command contributed by a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its name, and a function with typer annotations."""

    name: str
    function: Callable[..., None]
    help: str
