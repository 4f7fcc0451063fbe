"""The target and what runs it: ``--model``, ``--engine`` and the engine's own flags, in every command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..errors import ModelError

if TYPE_CHECKING:
    from ..engines import EngineProvider

#: The Hugging Face model in this process.
EMBEDDED: Final = "embedded"
Model = Annotated[str, typer.Option(help="The target: a local directory or a hub id.")]
Device = Annotated[str | None, typer.Option(help="Where to run; default: a GPU if there is one.")]
EngineName = Annotated[
    str,
    typer.Option(help="embedded: the model in this process; or an installed engine (capture-hooks plugins)."),
]
EngineFlags = Annotated[
    list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="The engine's own flags, after '--'.")
]
EstimateOnly = Annotated[bool, typer.Option("--estimate", help="Say what it would take, and stop.")]


def installed_engine(name: str) -> EngineProvider:
    """The engine of that name.

    Raises:
        PluginError: there is none; with those there are.
    """
    from ..plugins import MissingPluginError, registry

    try:
        found: EngineProvider = registry().engines[name]
    except MissingPluginError as error:
        raise MissingPluginError(f"{error}\n{EMBEDDED!r} needs no plugin") from None
    return found


def target_path(model: str) -> Path:
    """What an engine is given for a target: a directory, or a name that it resolves.

    Raises:
        ModelError: text that can only be a path, and no directory there; or an adapter's directory.
    """
    from ..target import locate

    if locate(model).adapter is not None:
        raise ModelError(
            f"{model} holds an adapter, and an engine is given whole models: merge it into its base "
            "(merge_and_unload of PEFT, then save_pretrained) and give that directory"
        )
    path = Path(model)
    if model.startswith((".", "/", "~")) and not path.is_dir():
        raise ModelError(f"{model} is not a directory; give the target's, or its name on the hub")
    return path


def refuse_flags(engine: str, words: Sequence[str]) -> None:
    """The embedded engine has no flags of its own.

    Raises:
        BadParameter: naming the first of ``words``.
    """
    if words:
        raise typer.BadParameter(
            f"unexpected {words[0]!r}: only engines other than {engine} take flags after --"
        )


def refuse_options(context: typer.Context, engine: str, *names: str) -> None:
    """Options that an engine sets by flags of its own.

    Raises:
        BadParameter: naming one that was given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(
                f"is for the {EMBEDDED} engine; {engine} takes flags of its own, after --", param_hint=option
            )
