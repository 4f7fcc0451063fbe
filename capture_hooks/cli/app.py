"""The ``capture-hooks`` command: assembles the commands, turns errors into one line and an exit code."""

from __future__ import annotations

import typer

from . import dump, eval_, generate, plugins, points, train

COMMANDS = (points, plugins, dump, train, generate, eval_)


def build() -> typer.Typer:
    """The application with the core's commands."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
    for module in COMMANDS:
        module.register(app)
    return app
