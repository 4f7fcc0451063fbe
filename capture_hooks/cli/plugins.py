"""``capture-hooks plugins``: what is installed, what it adds, what is broken."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ..plugins import registry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .contract import Command


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plugins")(plugins)


def plugins(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, tracebacks included.")
    ] = False,
) -> None:
    """List the installed plugins and what each adds; exit with 1 when one is broken."""
    installed = registry()
    unusable = {name: why for name, command in installed.commands.items() if (why := unfit(command))}
    overrides = {name: c.overrides for name, c in installed.conventions.items() if c.overrides is not None}
    if as_json:
        report = {
            "plugins": [
                {
                    "name": plugin.name,
                    "distribution": plugin.distribution,
                    "version": plugin.version,
                    "adds": dict(plugin.adds),
                }
                for plugin in installed.plugins
            ],
            "overrides": overrides,
            "broken": [asdict(plugin) for plugin in installed.broken],
            "unusable_commands": unusable,
        }
        print(json.dumps(report, indent=2))
    else:
        for plugin in installed.plugins:
            print(f"{plugin.name}  ({plugin.distribution} {plugin.version})")
            for kind, names in plugin.adds.items():
                shown = [_with_override(name, overrides) if kind == "conventions" else name for name in names]
                print(f"    {kind}: {', '.join(shown)}")
        for broken in installed.broken:
            print(f"BROKEN  {broken}")
        for name, why in unusable.items():
            print(f"BROKEN  command {name!r}: {why}")
    if installed.broken or unusable:
        raise typer.Exit(1)


def _with_override(name: str, overrides: Mapping[str, str]) -> str:
    return f"{name} (replaces {overrides[name]})" if name in overrides else name


def unfit(command: Command) -> str | None:
    """Why typer cannot make a command line of ``command``'s signature; None when it can."""
    trial = typer.Typer(add_completion=False)
    try:
        trial.command(command.name, help=command.help)(command.function)
        typer.main.get_command(trial)
    except (
        Exception
    ) as error:  # whatever a plugin's annotations provoke is shown, and must not end the others
        return f"{type(error).__name__}: {error}"
    return None
