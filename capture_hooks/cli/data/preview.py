"""``capture-hooks data preview``: a data set as it will be learnt, before GPU hours are spent."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from ...errors import DataError
from .._data import BadRows, ChatTemplate, DataOptions, Limit, Split, TemplateArgument, TurnsOption


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("preview")(preview)


def preview(
    data: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Conversations, text or token ids: .jsonl, .json, .txt (or .gz), .parquet, a `datasets` "
            "folder, or a data set's name on the hub.",
        ),
    ],
    model: Annotated[
        str, typer.Option(help="The target: a local directory or a hub id. Its weights are not loaded.")
    ],
    rows: Annotated[int, typer.Option(min=1, help="How many rows to show, from the first.")] = 3,
    row: Annotated[
        str | None, typer.Option(help="Show this row instead, whole: its number from 1, or FILE:LINE.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest sequence; default: the model's context.")
    ] = None,
    limit: Limit = None,
    split: Split = None,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    turns: TurnsOption = "auto",
    bad_rows: BadRows = "skip",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to look at in a browser, too.")] = None,
) -> None:
    """Show rows as they will be rendered and learnt, and what the whole data set amounts to."""
    from rich.console import Console
    from rich.text import Text

    from ...io import replacing
    from ...store.data import read_rows
    from ...store.data.examples import row_encoder
    from ...store.data.pieces import printable
    from ...target import context_length, load_config, load_processor, load_tokenizer
    from ...training.preview import pick, why_not
    from ...training.preview import preview as look_at
    from .._page import check_page
    from ._preview_html import page
    from ._preview_view import show

    if html is not None:
        check_page(html, data, DataError)
    options = DataOptions(limit, split, chat_template, tuple(template_arg or ()), turns, bad_rows)
    settings = options.settings()
    config = load_config(model)
    context = context_length(config)
    if max_length is not None and context is not None and max_length > context:
        raise DataError(f"--max-length {max_length} is beyond the model's context of {context} tokens")
    tokenizer, processor = load_tokenizer(model), partial(load_processor, model)
    console = Console(highlight=False, markup=False)
    with console.status(Text(f"reading {printable(data)}")) if not as_json else nullcontext():
        examples = options.examples(data, tokenizer, vocab_size=config.vocab_size, processor=processor)
        chosen = pick(examples, rows, row)
        if row is not None and not chosen:
            encoder = row_encoder(data, tokenizer, config.vocab_size, settings, turns, processor)
            raise why_not(row, islice(read_rows(data, split), limit), encoder)
        found = look_at(
            examples,
            chosen,
            tokenizer,
            settings,
            model=model,
            vocab_size=config.vocab_size,
            max_length=max_length if max_length is not None else context,
        )
    if html is not None:
        with replacing(html) as file:
            file.write(page(found).encode())
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    show(found, console, whole=row is not None)
    if html is not None:
        console.print(f"\nsaved {html}", soft_wrap=True)
