"""``capture-hooks train``: a draft head for a model, from a dump or from data."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..training import TrainConfig
from ._data import (
    BadRows,
    ChatTemplate,
    DataOptions,
    Limit,
    Split,
    TemplateArgument,
    TooLongOption,
    TurnsOption,
    show_summary,
)
from ._engines import Model
from ._settings import After, settings_as_options
from ._values import pairs

if TYPE_CHECKING:
    from torch import nn


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


@settings_as_options(TrainConfig, init_from=Path)
def train(
    model: Model,
    out: Annotated[Path, typer.Option(help="Where the head is saved.")],
    dump: Annotated[Path | None, typer.Option(help="A dump of the target's hidden states.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Conversations, text or token ids, as for dump; states are captured on the way."),
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="A dump or data to evaluate on, instead of a held-out part.")
    ] = None,
    too_long: TooLongOption = "error",
    limit: Limit = None,
    split: Split = None,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    turns: TurnsOption = "auto",
    bad_rows: BadRows = "error",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="KEY=VALUE setting of the head; may be repeated."),
        After("draft_vocab"),
    ] = None,
    ttt_steps: Annotated[
        int | None, typer.Option(help="Training-time-test steps (the head's 'steps').")
    ] = None,
    init_from_target: Annotated[
        bool,
        typer.Option("--init-from-target", help="Start the head's layer from the target's last layer."),
        After("pickles"),
    ] = False,
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Short for --precision bf16."), After("precision")
    ] = False,
    model_dtype: Annotated[
        str,
        typer.Option(help="The target's dtype: auto, float32, bfloat16 or float16."),
        After("save_dtype"),
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where to train; default: a GPU if there is one.")
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE field of transformers.TrainingArguments; may be repeated."),
        After("report_to"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run that was interrupted.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the head and run at --out.")
    ] = False,
    **settings: Any,
) -> None:
    """Train a draft head, show held-out acceptance, save the head."""
    if (dump is None) == (data is None):
        raise typer.BadParameter("give either --dump or --data")
    options = DataOptions(limit, split, chat_template, tuple(template_arg or ()), turns, bad_rows, too_long)
    head_config = pairs(set_, "--set")
    if ttt_steps is not None:
        head_config["steps"] = ttt_steps
    if init_from_target:
        head_config.setdefault("init_layer", -1)
    if settings["init_from"] is not None:
        settings["init_from"] = str(settings["init_from"])
    if bf16:
        settings["precision"] = "bf16"
    if eval_data is not None:
        settings["held_out"] = 0.0
    from ..interop.heads import FORMATS
    from ..plugins import registry
    from ..target import load_target
    from ..training import TrainingInterrupted, recorded_clock
    from ..training import train as run

    config = TrainConfig(head_config=head_config, trainer_args=pairs(trainer, "--trainer"), **settings)
    from ._train_view import TrainView

    target = load_target(model, model_dtype, device)
    first = int(os.environ.get("RANK", "0")) == 0
    clock = recorded_clock(out) if resume else None
    with TrainView() as view:
        learnt = dump_or_examples(str(dump or data), model, target, options, clock)
        evaluated = (
            dump_or_examples(eval_data, model, target, options, clock) if eval_data is not None else None
        )
        if first and data is not None:
            show_summary(view.console, learnt.summary)
        try:
            run(
                target,
                learnt,
                config,
                out=out,
                eval_data=evaluated,
                resume=resume,
                overwrite=overwrite,
                reporter=view,
                conventions=registry().conventions,
                formats=FORMATS,
            )
        except TrainingInterrupted as stopped:
            if first:
                print(f"{stopped}. Continue with the same command and --resume", file=sys.stderr)
            raise typer.Exit(130) from None
        table = view.table()
    if first:
        if table is not None:
            view.console.print(table, soft_wrap=False)
        view.console.print(f"saved {out}")


def dump_or_examples(
    path: str, model: str, target: nn.Module, options: DataOptions, clock: str | None
) -> Any:
    """The dump at ``path``, or the examples of the data set there."""
    from ..store import Dump
    from ..target import context_length, load_processor, load_tokenizer

    if (Path(path) / "manifest.json").exists():
        return Dump.open(Path(path))
    return options.examples(
        path,
        load_tokenizer(model),
        max_length=context_length(target),
        clock=clock,
        processor=partial(load_processor, model),
    )
