"""``capture-hooks serve``: a target with its head, in an engine's server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._engines import EngineFlags, target_path

if TYPE_CHECKING:
    from ..engines import EngineProvider


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    head: Annotated[Path, typer.Argument(help="A draft head with a capture section.")],
    engine: Annotated[str, typer.Option(help="An installed engine: see 'capture-hooks plugins'.")],
    settings: EngineFlags = None,
    model: Annotated[
        str | None, typer.Option(help="The target: a directory, or a name the engine resolves.")
    ] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds until it must be ready.")] = 1800,
) -> None:
    """Serve a target with its draft head; refused unless it is fed what it was trained on.

    Runs until Ctrl-C or SIGTERM (exit code 130 or 143).  The engine's flags win over those chosen here.
    """
    from ..plugins import registry

    provider: EngineProvider = registry().engines[engine]
    if model is None:
        raise typer.BadParameter(_whose(head), param_hint="--model")
    raise typer.Exit(provider.serve(head, target_path(model), settings or [], start_timeout))


def _whose(head: Path) -> str:
    """Why the target must be named, with what is known of it.

    Raises:
        HeadError: there is no such head.
    """
    from ..heads import inspect_head
    from ..plugins import registry

    target = inspect_head(head, conventions=registry().conventions).target
    if target is None:
        return f"is needed: {head} does not say which target it was trained on"
    return (
        f"is needed: {head} records which target it was trained on ({target.architecture}, "
        f"{target.n_layers} layers, {target.hidden_size} wide), not where that lies"
    )
