"""``capture-hooks train``: a draft head for a model, from a dump or from data."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

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
from ._pairs import pairs

if TYPE_CHECKING:
    from torch import nn


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train)


def train(
    model: Annotated[str, typer.Option(help="The target: a local directory or a hub id.")],
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
    held_out: Annotated[float, typer.Option(help="Share of the prompts held out for evaluation.")] = 0.05,
    head: Annotated[str, typer.Option(help="Kind of head.")] = "eagle3",
    spec: Annotated[
        str | None, typer.Option(help="Capture points; default: the dump's, or EAGLE-3's.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        typer.Option(help="Tokens the head can draft, by frequency; default: the whole vocabulary."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE setting of the head; may be repeated.")
    ] = None,
    ttt_steps: Annotated[
        int | None, typer.Option(help="Training-time-test steps (the head's 'steps').")
    ] = None,
    init_from: Annotated[Path | None, typer.Option(help="Start from this head, in any layout.")] = None,
    written_for: Annotated[
        str | None,
        typer.Option(help="The library whose layer ids --init-from has; or give --spec."),
    ] = None,
    accept_unverified: Annotated[
        bool,
        typer.Option("--accept-unverified", help="Take what a library's ids mean from its source alone."),
    ] = False,
    pickles: Annotated[
        bool, typer.Option("--pickles", help="Open a .bin of --init-from, weights only.")
    ] = False,
    init_from_target: Annotated[
        bool, typer.Option("--init-from-target", help="Start the head's layer from the target's last layer.")
    ] = False,
    steps: Annotated[int | None, typer.Option(help="Stop after so many optimiser steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Stop after so many passes over the data.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after so much time; the learning rate follows it.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    schedule: Annotated[Literal["cosine", "linear", "constant"], typer.Option()] = "cosine",
    warmup: Annotated[float, typer.Option(help="Share of the run spent warming up.")] = 0.03,
    min_lr: Annotated[float, typer.Option(help="Final share of the peak learning rate.")] = 0.0,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per optimiser step, over all processes.")] = 2048,
    accumulate: Annotated[int, typer.Option(help="Forward passes per optimiser step.")] = 1,
    max_length: Annotated[int | None, typer.Option(help="Cut longer sequences into windows.")] = None,
    optimizer: Annotated[
        Literal["adamw", "muon"], typer.Option(help="Of the head's matrices; muon needs torch >= 2.9.")
    ] = "adamw",
    weight_decay: Annotated[float, typer.Option()] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Gradient clipping; 0 for none.")] = 1.0,
    ema: Annotated[
        float | None, typer.Option(help="Decay of a moving average of the weights, kept at the end.")
    ] = None,
    precision: Annotated[
        Literal["float32", "bf16", "fp16"], typer.Option(help="Autocast of the head.")
    ] = "float32",
    bf16: Annotated[bool, typer.Option("--bf16", help="Short for --precision bf16.")] = False,
    save_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the saved head's weights.")
    ] = "float32",
    model_dtype: Annotated[
        str, typer.Option(help="The target's dtype: auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where to train; default: a GPU if there is one.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    evaluations: Annotated[int, typer.Option(help="How often to evaluate.")] = 10,
    save_minutes: Annotated[float, typer.Option(help="Minutes between checkpoints.")] = 10.0,
    save_steps: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, instead of minutes.")
    ] = None,
    log_steps: Annotated[int, typer.Option(help="Steps between log lines.")] = 10,
    workers: Annotated[int, typer.Option(help="Data loader processes.")] = 0,
    report_to: Annotated[str, typer.Option(help="tensorboard, wandb, ... or none.")] = "none",
    trainer: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE field of transformers.TrainingArguments; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run that was interrupted.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the head and run at --out.")
    ] = False,
) -> None:
    """Train a draft head, show held-out acceptance, save the head."""
    if (dump is None) == (data is None):
        raise typer.BadParameter("give either --dump or --data")
    options = DataOptions(limit, split, chat_template, tuple(template_arg or ()), turns, bad_rows, too_long)
    settings = pairs(set_, "--set")
    if ttt_steps is not None:
        settings["steps"] = ttt_steps
    if init_from_target:
        settings.setdefault("init_layer", -1)
    from ..plugins import registry
    from ..target import load_target
    from ..training import TrainConfig, TrainingInterrupted, recorded_clock
    from ..training import train as run

    config = TrainConfig(
        head=head,
        head_config=settings,
        spec=spec,
        draft_vocab=draft_vocab,
        init_from=str(init_from) if init_from is not None else None,
        written_for=written_for,
        accept_unverified=accept_unverified,
        pickles=pickles,
        steps=steps,
        epochs=epochs,
        max_minutes=max_minutes,
        lr=lr,
        schedule=schedule,
        warmup=warmup,
        min_lr=min_lr,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        max_length=max_length,
        optimizer=optimizer,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        ema=ema,
        precision="bf16" if bf16 else precision,
        save_dtype=save_dtype,
        held_out=held_out if eval_data is None else 0.0,
        seed=seed,
        evaluations=evaluations,
        save_minutes=save_minutes,
        save_steps=save_steps,
        log_steps=log_steps,
        workers=workers,
        report_to=report_to,
        trainer_args=pairs(trainer, "--trainer"),
    )
    from ._train_view import TrainView

    target = load_target(model, model_dtype, device)
    first = int(os.environ.get("RANK", "0")) == 0
    clock = recorded_clock(out) if resume else None
    with TrainView() as view:
        learnt = read(str(dump or data), model, target, options, clock)
        evaluated = read(eval_data, model, target, options, clock) if eval_data is not None else None
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


def read(path: str, model: str, target: nn.Module, options: DataOptions, clock: str | None) -> Any:
    """A dump where there is one, else examples."""
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
