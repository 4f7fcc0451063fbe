"""``capture-hooks eval``: what a head is worth over a file of prompts."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DecodingError
from ._data import (
    BadRows,
    ChatTemplate,
    Data,
    DataOptions,
    Limit,
    Split,
    TemplateArgument,
    TurnsOption,
    show_summary,
)
from ._decoding import Kernels, load
from ._engines import EMBEDDED, HELP, installed_engine, refuse_flags, refuse_options, target_path

if TYPE_CHECKING:
    from rich.progress import TaskID


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval")(eval_)


def eval_(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The target: a local directory or a hub id.")],
    head: Annotated[Path, typer.Option(help="A draft head trained for it.")],
    data: Data,
    limit: Limit = None,
    split: Split = None,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    turns: TurnsOption = "last",
    bad_rows: BadRows = "error",
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
    engine: Annotated[str, typer.Option(help=HELP)] = EMBEDDED,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[-- FLAGS]", help="The engine's own flags, after '--'.")
    ] = None,
) -> None:
    """Acceptance, speed against plain decoding in the same run, and whether the tokens are the same.

    Plain decoding is model.generate, or the engine without a head.
    Exits with 1 when an answer differs by more than the target's own rounding explains.
    """
    words = settings or []
    options = DataOptions(limit, split, chat_template, tuple(template_arg or ()), turns, bad_rows)
    if engine == EMBEDDED:
        refuse_flags(engine, words)
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
    else:
        embedded = ("draft_tokens", "tree", "min_confidence", "kernels", "dtype", "device")
        refuse_options(context, engine, *embedded)
        provider = installed_engine(engine)
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from ..decoding import evaluate
    from ..engines.evaluation import evaluate_engine
    from ..target import load_config, load_processor, load_tokenizer

    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what)
            progress.update(tasks[what], completed=done, total=total)

        if engine == EMBEDDED:
            prompts = options.prompts(
                data,
                tokenizer,
                vocab_size=decoder.anatomy.vocab_size,
                processor=partial(load_processor, model),
            )
            report = evaluate(decoder, prompts, max_new_tokens=max_new_tokens, on_progress=show)
        else:
            vocabulary = load_config(model).vocab_size
            prompts = options.prompts(data, load_tokenizer(model), vocab_size=vocabulary)
            report = evaluate_engine(
                provider,
                target_path(model),
                head,
                words,
                prompts,
                max_new_tokens=max_new_tokens,
                on_progress=show,
            )
    show_summary(Console(stderr=True, highlight=False, soft_wrap=True, markup=False), prompts.summary)
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        table = Table("", f"{model}, head {head}", title=None)
        for label, value in report.table():
            table.add_row(label, value)
        # Piped output is not cut to 80 columns.
        Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table, highlight=False)
    if not report.lossless:
        worst = next(d for d in report.divergences if not d.excused)
        raise DecodingError(f"an answer is not the target's own ({worst.source}): {worst}")
