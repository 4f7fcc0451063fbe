"""``capture-hooks data``: what people have, looked at and answered again before it is learnt."""

from __future__ import annotations

from types import ModuleType

import typer

from . import preview, regenerate

#: Each adds its command.
COMMANDS: tuple[ModuleType, ...] = (preview, regenerate)


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, help="Look at a data set as it will be learnt, or remake it.")
    for module in COMMANDS:
        module.register(group)
    app.add_typer(group, name="data")
