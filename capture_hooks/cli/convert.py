"""``capture-hooks convert``: a head or a dump of one library, as another library has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ._values import parse_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

_HEADS, _DUMPS = "Heads only", "Dumps only"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("convert")(convert)


def convert(
    source: Annotated[Path, typer.Argument(help="A head's directory, or a dump's.")],
    destination: Annotated[Path, typer.Argument(help="Where to.")],
    to: Annotated[
        str,
        typer.Option(
            help="Head: capture-hooks, eagle (SpecForge), modelopt, speculators. Dump: a format's name."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="The target: a directory or hub id. Its weights are read only for capture-hooks."),
    ] = None,
    written_for: Annotated[
        str | None, typer.Option(help="The library, or convention, whose rule the source's ids follow.")
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(help="The source's inputs in its own order, such as 'post.1, post.14, post.26'."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write it with losses, recorded in the file.", rich_help_panel=_HEADS),
    ] = False,
    accept_unverified: Annotated[
        bool,
        typer.Option(
            "--accept-unverified",
            help="Use a convention that was only read in its library's source.",
            rich_help_panel=_HEADS,
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a head at DESTINATION.", rich_help_panel=_HEADS)
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Text for the witness; default: random tokens.", rich_help_panel=_HEADS),
    ] = None,
    read_as: Annotated[
        str | None,
        typer.Option("--from", help="The format, if it is not recognised.", rich_help_panel=_DUMPS),
    ] = None,
    ids: Annotated[
        str | None,
        typer.Option(help="Layer ids it was made with, such as 1,14,26.", rich_help_panel=_DUMPS),
    ] = None,
    last: Annotated[
        Literal["normed", "unnormed"] | None,
        typer.Option(help="Whether its last state is normed.", rich_help_panel=_DUMPS),
    ] = None,
    masks: Annotated[
        str | None,
        typer.Option(help="What to learn: 'all', or data with the same tokens.", rich_help_panel=_DUMPS),
    ] = None,
    keep_mask: Annotated[
        Literal["marks", "losses"],
        typer.Option(help="Keep the marked tokens, or the losses that count.", rich_help_panel=_DUMPS),
    ] = "marks",
    pickles: Annotated[
        bool,
        typer.Option("--pickles", help="Open .bin, .pt and .ckpt, weights only."),
    ] = False,
) -> None:
    """Write a head or a dump in another library's layout, exactly.

    What cannot be exact is refused, with each loss named (exit code 1).
    """
    head = (source / "config.json").exists()
    heads_only = {
        "--force": force,
        "--accept-unverified": accept_unverified,
        "--overwrite": overwrite,
        "--data": data is not None,
    }
    dumps_only = {
        "--from": read_as is not None,
        "--ids": ids is not None,
        "--last": last is not None,
        "--masks": masks is not None,
        "--keep-mask": keep_mask != "marks",
    }
    if wrong := [name for name, given in (dumps_only if head else heads_only).items() if given]:
        kind = "a head (it has a config.json)" if head else "no head (it has no config.json)"
        raise typer.BadParameter(f"{source} is {kind}; {', '.join(wrong)} makes no sense there")
    from ..spec import CaptureSpec

    points = None if spec is None else CaptureSpec.parse(spec)
    if not head:
        from ..interop.dumps import Declared

        declared = Declared(
            points,
            None if ids is None else tuple(parse_ids(ids)),
            written_for,
            last,
            _masks(masks),
            keep_mask,
            target,
            pickles,
        )
        _dump(source, destination, to, read_as, declared)
        return
    from ..interop.heads import TargetShape, convert_head, layout_named
    from ..plugins import registry
    from ..target import load_target, load_whole_config

    model: nn.Module | None = None
    ours = layout_named(to) == "capture-hooks"
    if ours and target is None:
        raise typer.BadParameter("the head will carry its target's fingerprint and states: give --target")
    if ours and target is not None:
        model = load_target(target, "auto", "cpu")
    done = convert_head(
        source,
        destination,
        to=to,
        target=TargetShape.of_config(load_whole_config(target), target) if target is not None else None,
        model=model,
        written_for=written_for,
        spec=points,
        tokens=_tokens(data, target),
        accept_unverified=accept_unverified,
        pickles=pickles,
        force=force,
        overwrite=overwrite,
        conventions=registry().conventions,
    )
    print(f"{done.source}: {done.layout_from} head, eats {done.spec}")
    print(f"saved {done.destination} as {done.layout_to}{', inputs by depth' if done.moved else ''}")
    _listed("lost", done.losses)
    _listed("note", done.notes)
    if done.left_out:
        print(f"left out, for no reader of a head uses them: {', '.join(sorted(done.left_out))}")


def _dump(source: Path, destination: Path, to: str, read_as: str | None, declared: Any) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from ..interop.dumps import convert_dump
    from ..plugins import registry

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(escape(f"{source}"), total=None)
        report: Callable[[int, int], None] = lambda done, total: bar.update(  # noqa: E731
            task, completed=done, total=total
        )
        done = convert_dump(
            source,
            destination,
            to=to,
            read_as=read_as,
            declared=declared,
            on_progress=report,
            conventions=registry().conventions,
            formats=registry().formats,
        )
    points = "" if done.spec is None else f", {done.spec}"
    print(f"{source}: {done.read_as} dump, {done.sequences} sequences, {done.tokens:,} tokens{points}")
    print(f"saved {destination} as {done.written_as}, {done.dtype}")
    _listed("note", done.notes)


def _listed(kind: str, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print(f"  {kind}: {sentence}")


def _masks(text: str | None) -> Any:
    return text if text in (None, "all") else Path(text)


def _tokens(data: Path | None, target: str | None) -> list[list[int]] | None:
    """Token ids of the first few records."""
    if data is None:
        return None
    from ..store import read_examples
    from ..target import load_tokenizer

    if target is None:
        raise typer.BadParameter("--data is for the witness of a capture-hooks head: give --target")
    examples = read_examples(data, load_tokenizer(target), max_length=48, too_long="truncate")
    return [example.token_ids.tolist() for example in examples[:4]]
