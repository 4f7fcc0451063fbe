"""``capture-hooks explain``: what a head, its ids or a dump mean, and what each engine will do with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import HeadError
from ._values import parse_ids


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("explain")(explain)


def explain(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="[HEAD|DUMP]", help="A head's directory in any layout, or a dump's."),
    ] = None,
    ids: Annotated[
        str | None, typer.Option(help="Bare layer ids, such as 2,30,58; of a dump, those it was made with.")
    ] = None,
    written_for: Annotated[
        str | None, typer.Option(help="The convention, or library, by whose rule the ids were written.")
    ] = None,
    spec: Annotated[
        str | None, typer.Option(help="The states it was trained on, such as 'post.2, post.30, post.58'.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The target: a directory or hub id; only its config is read.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="The target's model_type, without --target.")] = None,
    layers: Annotated[int | None, typer.Option(help="The target's layers, without --target.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Must agree: sglang, vllm.v1, sglang==0.5.21; may be repeated."),
    ] = None,
    pickles: Annotated[
        bool, typer.Option("--pickles", help="Open .bin, .pt and .ckpt, weights only.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Show earlier versions, other libraries and all findings, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at in a browser, too.")] = None,
) -> None:
    """Say which states each engine will feed a head, and whether it was trained on them.

    Exit code 0: every --engine agrees; without --engine, the files themselves are in order.
    """
    from ..interop.explain import ExplainOptions, Known, agrees
    from ..interop.explain import explain as explained
    from ..plugins import registry
    from ..spec import CaptureSpec

    asked = ExplainOptions(
        target=target,
        family=family,
        layers=layers,
        written_for=written_for,
        spec=None if spec is None else CaptureSpec.parse(spec),
        pickles=pickles,
    )
    if subject is None and ids is None:
        raise typer.BadParameter("give a head's or a dump's directory, or --ids")
    if html is not None:
        from ._page import check_page

        check_page(html, subject, HeadError)
    known = Known(registry().conventions, tuple(registry().readers.values()), registry().formats)
    report = explained(subject, None if ids is None else parse_ids(ids), asked, known)
    engines = engine or []
    good = agrees(report, engines)
    if html is not None:
        from ..io import replacing
        from ._explain_html import page

        with replacing(html) as file:
            file.write(page(report, engines).encode())
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        from rich.console import Console

        from ._explain_view import show, show_all

        console = Console(highlight=False)
        if everything:
            show_all(report, console)
        else:
            show(report, console, engines)
        if html is not None:
            console.print(f"\nsaved {html}", soft_wrap=True, markup=False)
    if not good:
        raise typer.Exit(1)
