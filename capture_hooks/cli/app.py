"""The ``capture-hooks`` command, assembled from the core's commands and the plugins'."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from .._version import __version__
from ..errors import PluginError
from ..plugins import Registry, registry
from . import convert, data, decoding, dump, explain, plugins, points, serve, train
from .contract import Command

COMMANDS = (points, explain, convert, plugins, data, dump, train, decoding, serve)


def build(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application for one command line.

    Plugins are loaded only when ``arguments`` name none of the core's commands, so that those start fast.

    Raises:
        PluginError: two plugins add the same command, or one adds a command of the core's.
    """
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
    app.callback()(_options)
    for module in COMMANDS:
        module.register(app)
    core = {command.name for command in app.registered_commands}
    core |= {group.name for group in app.registered_groups}
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    if wanted not in core and "--version" not in arguments:
        installed = registry()
        commands: Mapping[str, Command] = installed.commands
        for command in commands.values():
            if command.name in core:
                raise PluginError(
                    f"{_owner(installed, command)} adds a command {command.name!r}, which is the core's own; "
                    "leave it out with CAPTURE_HOOKS_DISABLE_PLUGINS"
                )
            if (problem := plugins.unfit(command)) is not None:
                print(f"warning: command {command.name!r} is left out: {problem}", file=sys.stderr)
                continue
            app.command(command.name, help=command.help)(command.function)
        if wanted is not None and wanted not in installed.commands and installed.broken:
            print("warning: broken plugins are left out; see 'capture-hooks plugins'", file=sys.stderr)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"capture-hooks {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Declarative hidden-state capture for draft heads: the spec travels with the head."""


def _owner(installed: Registry, command: Command) -> str:
    return next(
        plugin.distribution for plugin in installed.plugins if command.name in plugin.adds.get("commands", ())
    )
