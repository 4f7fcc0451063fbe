"""``capture-hooks eval``: what a head is worth over a file of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..errors import DecodingError
from ._decoding import Kernels, load


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval")(eval_)


def eval_(
    model: Annotated[str, typer.Option(help="The target: a local directory or a hub id.")],
    head: Annotated[Path, typer.Option(help="A draft head trained for it.")],
    data: Annotated[Path, typer.Option(help="Prompts: conversations, messages, text or token ids.")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Most tokens drafted a round.")] = 5,
    tree: Annotated[
        str | None, typer.Option(help="Draft a tree: DEPTH,BRANCH,SIZE, for example 5,4,15.")
    ] = None,
    min_confidence: Annotated[
        float, typer.Option(help="Stop drafting below this chance of acceptance, as the head sees it.")
    ] = 0.0,
    kernels: Annotated[
        Kernels, typer.Option(help="packed: faster verification on a CPU, twice the memory.")
    ] = "stock",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Acceptance, speed against model.generate in the same run, and whether the tokens are the same.

    Exits with 1 when an answer differs by more than the target's own rounding explains.
    """
    decoder, tokenizer = load(
        model,
        head,
        draft_tokens=draft_tokens,
        tree=tree,
        min_confidence=min_confidence,
        kernels=kernels,
        dtype=dtype,
        device=device,
    )
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from ..decoding import evaluate, read_prompts

    prompts = read_prompts(data, tokenizer, vocab_size=decoder.anatomy.vocab_size, limit=limit)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks = {what: progress.add_task(what, total=None) for what in ("offline", "decoding")}
        report = evaluate(
            decoder,
            prompts,
            max_new_tokens=max_new_tokens,
            on_progress=lambda what, done, total: progress.update(tasks[what], completed=done, total=total),
        )
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        table = Table("", f"{model}, head {head}", title=None)
        for label, value in report.table():
            table.add_row(label, value)
        # Piped output is not cut to 80 columns.
        Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False)
    if not report.lossless:
        worst = next(d for d in report.divergences if not d.excused)
        raise DecodingError(f"an answer is not the target's own ({worst.source}): {worst}")
