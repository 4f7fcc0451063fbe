"""``capture-hooks generate``: one answer, streamed; ``eval``: what a head is worth over a file of prompts."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import DataError, DecodingError, ModelError
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
from ._engines import (
    EMBEDDED,
    EngineFlags,
    EngineName,
    Model,
    installed_engine,
    refuse_flags,
    refuse_options,
    target_path,
)

if TYPE_CHECKING:
    from rich.progress import TaskID

    from ..decoding import SpeculativeDecoder

Kernels = Literal["stock", "packed"]
DraftTokens = Annotated[int, typer.Option(min=1, help="Most tokens drafted a round.")]
Tree = Annotated[str | None, typer.Option(help="Draft a tree: DEPTH,BRANCH,SIZE, for example 5,4,15.")]
LeastConfidence = Annotated[
    float, typer.Option(help="Stop drafting below this chance of acceptance, as the head sees it.")
]
KernelsOption = Annotated[
    Kernels, typer.Option(help="packed: faster verification on a CPU, twice the memory.")
]
TargetDtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")]
TargetDevice = Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")]


def register(app: typer.Typer) -> None:
    """Add the two commands."""
    app.command("generate")(generate)
    app.command("eval")(eval_)


def load(
    model: str,
    head: Path,
    *,
    draft_tokens: int,
    tree: str | None,
    min_confidence: float,
    kernels: Kernels,
    dtype: str,
    device: str | None,
) -> tuple[SpeculativeDecoder, Any]:
    """The decoder, and the tokenizer where the model has one.

    Raises:
        ModelError: when there is no such model.
        HeadError: when the head is damaged or another target's.
    """
    from ..decoding import SpeculativeDecoder
    from ..heads import load_head
    from ..interop.heads import FORMATS
    from ..plugins import registry
    from ..target import load_target, load_tokenizer

    shape = parse_tree(tree)
    target: Any = load_target(model, dtype, device)
    draft = load_head(head, target, formats=FORMATS, conventions=registry().conventions)
    draft = draft.to(next(target.parameters()).device).eval()
    decoder = SpeculativeDecoder(
        target, draft, draft_tokens, shape, min_confidence=min_confidence, kernels=kernels
    )
    return decoder, load_tokenizer(model)


def parse_tree(text: str | None) -> Any:
    """``DEPTH,BRANCH,SIZE`` as a `TreeShape`."""
    if text is None:
        return None
    from ..decoding import TreeShape

    try:
        depth, branch, size = (int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not DEPTH,BRANCH,SIZE, for example 5,4,15", param_hint="--tree"
        ) from None
    return TreeShape(depth, branch, size)


def generate(
    model: Model,
    head: Annotated[Path, typer.Option(help="A draft head trained for it.")],
    prompt: Annotated[str, typer.Option(help="The user's message, or '-' for standard input.")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without chat template.")
    ] = False,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    draft_tokens: DraftTokens = 5,
    tree: Tree = None,
    min_confidence: LeastConfidence = 0.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 for no limit.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    kernels: KernelsOption = "stock",
    dtype: TargetDtype = "auto",
    device: TargetDevice = None,
) -> None:
    """Generate an answer with speculative decoding; text goes to stdout, figures to stderr."""
    options = DataOptions(chat_template=chat_template, template_arguments=tuple(template_arg or ()))
    settings = options.settings()
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
    import torch
    from transformers import TextStreamer

    from ..decoding import chat_prompt, text_prompt
    from ..decoding.stats import DecodeStats

    if tokenizer is None:
        raise ModelError(f"the model {model} has no tokenizer, so it can read no prompt")
    text = _standard_input() if prompt == "-" else prompt
    if raw:
        ids = text_prompt(tokenizer, text)
    else:
        turns = [{"role": "system", "content": system}] if system is not None else []
        ids = chat_prompt(tokenizer, [*turns, {"role": "user", "content": text}], settings)
    how: dict[str, Any] = {"do_sample": False}
    generator = None
    if temperature > 0:
        how = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        generator = torch.Generator(decoder.target.device).manual_seed(seed)
    streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True)
    rounds = []
    start = time.perf_counter()
    prompt_ids = torch.tensor([ids], dtype=torch.long, device=decoder.target.device)
    for step in decoder.stream(prompt_ids, max_new_tokens, generator=generator, **how):
        rounds.append(step)
        for token in step.tokens:
            streamer.put(torch.tensor([token]))
    streamer.end()
    seconds = time.perf_counter() - start
    stats = DecodeStats.of(rounds[1:], rounds[0].verify_seconds)
    shares = " ".join(f"{share:.2f}" for share in stats.conditional_acceptance) or "-"
    print(
        f"{stats.tokens + len(rounds[0].tokens)} tokens in {stats.rounds} rounds, "
        f"acceptance length {stats.acceptance_length:.2f}, acceptance by position {shares}, "
        f"{(stats.tokens + len(rounds[0].tokens)) / seconds:.1f} tokens/s",
        file=sys.stderr,
    )


def _standard_input() -> str:
    """The prompt that is piped in.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the standard input is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from None


def eval_(
    context: typer.Context,
    model: Model,
    head: Annotated[Path, typer.Option(help="A draft head trained for it.")],
    data: Data,
    limit: Limit = None,
    split: Split = None,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    turns: TurnsOption = "last",
    bad_rows: BadRows = "error",
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    draft_tokens: DraftTokens = 5,
    tree: Tree = None,
    min_confidence: LeastConfidence = 0.0,
    kernels: KernelsOption = "stock",
    dtype: TargetDtype = "auto",
    device: TargetDevice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    engine: EngineName = EMBEDDED,
    settings: EngineFlags = None,
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
