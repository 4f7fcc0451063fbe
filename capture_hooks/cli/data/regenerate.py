"""``capture-hooks data regenerate``: the target answers a data set again."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ...errors import CaptureHooksError, DataError
from .._data import BadRows, ChatTemplate, DataOptions, Limit, Split, TemplateArgument
from .._engines import (
    EMBEDDED,
    Device,
    EngineFlags,
    EngineName,
    EstimateOnly,
    Model,
    installed_engine,
    refuse_flags,
    refuse_options,
    target_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from ...decoding.answering import Cost, Regenerated, Regeneration
    from ...decoding.contract import GeneratingEngine, Sampling


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("regenerate")(regenerate)


def regenerate(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Conversations, prompts or token ids: .jsonl, .json (or .gz), .parquet, a `datasets` "
            "folder, or a data set's name on the hub.",
        ),
    ],
    model: Model,
    out: Annotated[Path, typer.Option(help="The file to make: .jsonl or .jsonl.gz.")],
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; default: as the target's generation_config.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Default: as the target's.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Default: as the target's.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 2048,
    unfinished: Annotated[
        Literal["drop", "keep"],
        typer.Option(
            help="An answer that reached that limit: drop it and what follows it, or keep it as it is."
        ),
    ] = "drop",
    limit: Limit = None,
    split: Split = None,
    chat_template: ChatTemplate = None,
    template_arguments: TemplateArgument = None,
    bad_rows: BadRows = "error",
    batch_size: Annotated[int, typer.Option(min=1, max=100_000, help="Prompts answered at a time.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Device = None,
    estimate: EstimateOnly = False,
    engine: EngineName = EMBEDDED,
    settings: EngineFlags = None,
) -> None:
    """Have the target answer a data set again: a draft head learns best from what its target would say.

    Every assistant turn is asked with a server's prompt, new answers in its history; turns with tool calls,
    and those that are not learnt, stay.  Run the same command again after an interruption: it continues.
    """
    from datetime import datetime

    from rich.console import Console

    from ...decoding.answering import Regeneration, begun_at, describe, model_digest, sampling_of
    from ...target import load_config, load_tokenizer

    console = Console(highlight=False, soft_wrap=True)
    words = settings or []
    identity = {"model": model_digest(model), "engine": engine}
    if engine == EMBEDDED:
        refuse_flags(engine, words)
        identity["dtype"] = dtype
    else:
        refuse_options(context, engine, "batch_size", "dtype", "device")
        installed_engine(engine)
    options = DataOptions(limit, split, chat_template, tuple(template_arguments or ()))
    sampling, left_out = sampling_of(model, temperature=temperature, top_k=top_k, top_p=top_p)
    own = " (the target's generation_config)" if temperature is None and top_k is top_p is None else ""
    seeded = f", seed {seed}" if sampling.temperature else ""
    console.print(f"answers {describe(sampling)}{own}{seeded}; at most {max_new_tokens:,} tokens each")
    if left_out:
        console.print(f"        the target's generation_config also sets {', '.join(left_out)}: not applied")
    job = Regeneration(
        data,
        out,
        load_tokenizer(model),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        unfinished=unfinished,
        template=options.settings(begun_at(out) or datetime.now().replace(microsecond=0).isoformat()),
        limit=limit,
        split=split,
        bad_rows=bad_rows,
        vocab_size=load_config(model).vocab_size,
        identity=identity,
    )
    if job.is_finished:
        console.print(f"{out} is finished: these answers with these settings")
        return
    left = job.left
    _show_survey(console, job, left)
    if not left:
        _show(console, out, job.finish())
        return
    console.print(f"engine  starting {engine}")
    with (
        _embedded(model, sampling, batch_size, dtype, device)
        if engine == EMBEDDED
        else installed_engine(engine).generate(target_path(model), sampling, words)
    ) as running:
        told = ", ".join(f"{name} {value}" for name, value in running.settings.items())
        console.print(f"engine  {running.name} {running.version}: {told}")
        _show_cost(console, job.cost(running), max_new_tokens)
        if not estimate:
            _show(console, out, _run(console, job, running))


@contextmanager
def _embedded(
    model: str, sampling: Sampling, batch_size: int, dtype: str, device: str | None
) -> Iterator[GeneratingEngine]:
    from ...decoding.answering import EmbeddedGeneration
    from ...target import load_target

    yield EmbeddedGeneration(load_target(model, dtype, device), sampling, batch_size)


def _run(console: Console, job: Regeneration, engine: GeneratingEngine) -> Regenerated:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    with Progress(
        TextColumn("answers"),
        BarColumn(bar_width=20),
        TextColumn(
            "{task.percentage:>3.0f} %  {task.completed:,.0f} of {task.total:,.0f}{task.fields[speed]}"
        ),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    ) as bar:
        task = bar.add_task("answers", total=job.survey.answers, completed=0, speed="")

        def report(answers: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            speed = f", {tokens / elapsed:,.0f} tokens/s" if tokens and elapsed else ""
            bar.update(task, completed=answers, speed=speed)

        try:
            return job.run(engine, report)
        except (KeyboardInterrupt, CaptureHooksError) as error:
            again = "" if isinstance(error, DataError) else "; the same command continues there"
            console.print(f"what was answered is kept beside {job.out}{again}")
            raise


def _show_survey(console: Console, job: Regeneration, left: int) -> None:
    found = job.survey
    there = f"; {found.answers - left:,} are there already" if left < found.answers else ""
    console.print(f"data    {found.rows:,} rows, {found.answers:,} answers to write{there}")
    stay = {
        "with tool calls": found.stay.calls,
        "of weight 0": found.stay.unlearnt,
        "that open a conversation": found.stay.openings,
        "right behind another": found.stay.following,
    }
    if told := ", ".join(f"{count:,} {what}" for what, count in stay.items() if count):
        console.print(f"        assistant turns that stay as they are: {told}")
    if found.as_is:
        console.print(f"        {found.as_is:,} rows have no answer to write and stay as they are")


def _show_cost(console: Console, cost: Cost, most: int) -> None:
    told = f"cost    {cost.answers:,} answers: "
    if cost.seconds is not None and cost.tokens is not None:
        told += f"about {_time(cost.seconds)} if they are as long as the data's ({cost.tokens:,.0f} tokens), "
    told += f"about {_time(cost.most_seconds)} if all have {most:,} tokens"
    console.print(f"{told}; {cost.tokens_per_second:,.0f} tokens/s (measured)")


def _show(console: Console, out: Path, made: Regenerated) -> None:
    console.print(
        f"saved   {out}: {made.rows:,} rows, {made.answers:,} answers, {made.tokens:,} tokens by the target"
    )
    words = {
        "exact": "token for token as the target wrote them",
        "without its end": "learnt as the target wrote them, and with an end that it did not write",
        "other end": "learnt with another end than the target wrote",
        "other tokens": "learnt as the same text in other tokens",
        "other text": "learnt as another text than the target wrote: the chat template changes it",
    }
    for fit, count in made.fits.items():
        console.print(f"        {count:,} answers ({count / made.answers:.1%}) {words[fit]}")
    asked = made.answers + sum(made.cut.values())
    reasons = {
        "unfinished": "reached the limit of tokens",
        "too long": "had a prompt beyond the context",
        "unreadable": "cannot be shown by the chat template",
    }
    for cut, count in made.cut.items():
        console.print(
            f"        {count:,} answers ({count / asked:.1%}) {reasons[cut]}: dropped with what followed them"
        )
    if made.emptied:
        console.print(f"        {made.emptied:,} rows left out, because no answer is left in them")
    if made.dropped:
        console.print(f"        columns left out, because JSON cannot hold them: {', '.join(made.dropped)}")
    for bad in made.bad:
        console.print(f"        {bad.count:,} rows left out: {bad.reason}: first {', '.join(bad.first)}")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
