"""``capture-hooks dump``: a model's hidden states over a data set, as a directory of shards."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import DataError, SpecError, StoreError
from ..foreign import read_text
from ._data import (
    BadRows,
    ChatTemplate,
    Data,
    DataOptions,
    Limit,
    Split,
    TemplateArgument,
    TooLongOption,
    TurnsOption,
    show_summary,
)
from ._engines import (
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

    from ..spec import CaptureSpec
    from ..store import Examples, Manifest, StateSource
    from ..store.writing import Estimate

EAGLE3 = "eagle3"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("dump")(dump)


def dump(
    context: typer.Context,
    model: Model,
    spec: Annotated[
        str,
        typer.Option(help="What to capture: 'post.2, post.15, post.26', @FILE.json, or eagle3 (its layers)."),
    ],
    data: Data,
    out: Annotated[Path, typer.Option(help="Where the dump is written, or was begun.")],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the stored states; default: the model's own."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest sequence; default: the model's context.")
    ] = None,
    too_long: TooLongOption = "error",
    limit: Limit = None,
    split: Split = None,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    turns: TurnsOption = "auto",
    bad_rows: BadRows = "error",
    shard_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a shard; default: about 256 MiB of them.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one forward pass.")] = 4096,
    model_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Device = None,
    estimate: EstimateOnly = False,
    engine: EngineName = EMBEDDED,
    settings: EngineFlags = None,
) -> None:
    """Dump hidden states.  Run the same command again after an interruption: it continues."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    asked = None if spec.strip() == EAGLE3 else _spec(spec)
    words = settings or []
    if engine == EMBEDDED:
        refuse_flags(engine, words)
    else:
        refuse_options(context, engine, "batch_tokens", "model_dtype", "device")
    options = DataOptions(limit, split, chat_template, tuple(template_arg or ()), turns, bad_rows, too_long)
    examples = _examples(model, data, max_length, options, _clock_of(out))
    with (
        _embedded(model, asked, examples, dtype, shard_tokens, batch_tokens, model_dtype, device, console)
        if engine == EMBEDDED
        else _through(engine, words, model, asked, examples, out, dtype, shard_tokens, console)
    ) as source:
        _finish(console, source, out, estimate)


@contextmanager
def _embedded(
    model: str,
    asked: CaptureSpec | None,
    examples: Examples,
    dtype: str | None,
    shard_tokens: int | None,
    batch_tokens: int,
    model_dtype: str,
    device: str | None,
    console: Console,
) -> Iterator[StateSource]:
    from ..capture import find_anatomy
    from ..store import ModelStates
    from ..target import load_target

    target = load_target(model, model_dtype, device)
    if asked is None:
        asked = _eagle3(find_anatomy(target).n_layers, console)
    yield ModelStates(
        target, asked, examples, dtype=dtype, shard_tokens=shard_tokens, batch_tokens=batch_tokens
    )


@contextmanager
def _through(
    engine: str,
    words: list[str],
    model: str,
    asked: CaptureSpec | None,
    examples: Examples,
    out: Path,
    dtype: str | None,
    shard_tokens: int | None,
    console: Console,
) -> Iterator[StateSource]:
    from ..engines.dump import EngineStates, dtype_of, first_states
    from ..store.data.examples import check_text_alone
    from ..store.manifest import MANIFEST
    from ..target import checkpoint_fingerprint, hollow_anatomy

    provider, path = installed_engine(engine), target_path(model)
    check_text_alone(examples, engine)
    anatomy = hollow_anatomy(model)
    spec = (asked or _eagle3(anatomy.n_layers, console)).absolute(anatomy.n_layers)
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / MANIFEST).exists())):
        raise StoreError(f"{out} is neither a dump nor an empty directory; give another --out")
    console.print(f"engine  starting {engine}")
    with provider.capture(path, spec, words) as running:
        console.print(
            f"engine  {running.name} {running.version}, at most {running.batch_tokens:,} tokens at once"
        )
        trial = first_states(running, examples)
        fingerprint = checkpoint_fingerprint(model, dtype_of(trial))
        yield EngineStates(
            running, trial, anatomy, fingerprint, spec, examples, dtype=dtype, shard_tokens=shard_tokens
        )


def _finish(console: Console, source: StateSource, out: Path, only_estimate: bool) -> None:
    from ..store import estimate

    cost = estimate(source, out)
    _show(console, source.manifest, source.examples, cost)
    if only_estimate:
        return
    if cost.bytes_left > cost.bytes_free:
        raise StoreError(
            f"{out}: {_size(cost.bytes_left)} are to be written, only {_size(cost.bytes_free)} are free; "
            "take a smaller --dtype, a --limit, or another disk"
        )
    _run(console, source, out, cost)


def _spec(text: str) -> CaptureSpec:
    from ..spec import CaptureSpec

    if not text.startswith("@"):
        return CaptureSpec.parse(text)
    return CaptureSpec.from_json(read_text(Path(text[1:]), "the spec", SpecError))


def _eagle3(n_layers: int, console: Console) -> CaptureSpec:
    from ..spec import CaptureSpec

    spec = CaptureSpec.eagle3(n_layers)
    console.print(f"spec    eagle3 in a model of {n_layers} layers: {spec}")
    return spec


def _examples(
    model: str, data: str, max_length: int | None, options: DataOptions, clock: str | None
) -> Examples:
    from ..target import context_length, load_config, load_processor, load_tokenizer

    config = load_config(model)
    context = context_length(config)
    if max_length is not None and context is not None and max_length > context:
        raise DataError(f"--max-length {max_length} is beyond the model's context of {context} tokens")
    return options.examples(
        data,
        load_tokenizer(model),
        vocab_size=config.vocab_size,
        max_length=max_length if max_length is not None else context,
        clock=clock,
        processor=partial(load_processor, model),
    )


def _clock_of(out: Path) -> str | None:
    """What the chat template was told of the date when the dump at ``out`` was begun."""
    from ..store.manifest import MANIFEST, Manifest

    return Manifest.read(out).data.clock if (out / MANIFEST).exists() else None


def _show(console: Console, manifest: Manifest, examples: Examples, cost: Estimate) -> None:
    cut = f"; {examples.truncated:,} cut" if examples.truncated else ""
    cut += f"; {examples.skipped:,} left out" if examples.skipped else ""
    target = manifest.fingerprint
    done = cost.tokens - cost.tokens_left
    there = f"; {done:,} tokens are there already" if done else ""
    console.print(
        f"data    {cost.sequences:,} sequences, {cost.tokens:,} tokens, {examples.learnt:,} to learn{cut}"
    )
    show_summary(console, examples.summary)
    console.print(
        f"target  {target.architecture}, {target.n_layers} layers of {target.hidden_size}, {target.dtype}\n"
        f"states  {manifest.spec}, target {manifest.spec.target}, in {manifest.dtype}\n"
        f"cost    about {_time(cost.seconds)}{there}; "
        f"{_size(cost.bytes_left)} of disk, {_size(cost.bytes_free)} free"
    )


def _run(console: Console, source: StateSource, out: Path, cost: Estimate) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from ..store import write_dump

    with Progress(
        TextColumn("dump"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %  {task.completed:,.0f} tokens, {task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    ) as bar:
        task = bar.add_task("dump", total=cost.tokens, completed=cost.tokens - cost.tokens_left, speed="-")

        def report(tokens: int) -> None:
            speed = bar.tasks[0].finished_speed or bar.tasks[0].speed
            bar.update(task, completed=tokens, speed=f"{speed:,.0f}" if speed else "-")

        try:
            manifest = write_dump(source, out, report)
        except KeyboardInterrupt:
            console.print(f"{out} holds what was complete; the same command continues there")
            raise
    console.print(f"saved {out}: {manifest.sequences:,} sequences in {len(manifest.shards):,} shards")


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
