"""``capture-hooks generate``: one answer, streamed, with what speculation gained."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import DataError, ModelError
from ._data import ChatTemplate, DataOptions, TemplateArgument
from ._decoding import Kernels, load


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("generate")(generate)


def generate(
    model: Annotated[str, typer.Option(help="The target: a local directory or a hub id.")],
    head: Annotated[Path, typer.Option(help="A draft head trained for it.")],
    prompt: Annotated[str, typer.Option(help="The user's message, or '-' for standard input.")],
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, without chat template.")
    ] = False,
    chat_template: ChatTemplate = None,
    template_arg: TemplateArgument = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Most tokens drafted a round.")] = 5,
    tree: Annotated[
        str | None, typer.Option(help="Draft a tree: DEPTH,BRANCH,SIZE, for example 5,4,15.")
    ] = None,
    min_confidence: Annotated[
        float, typer.Option(help="Stop drafting below this chance of acceptance, as the head sees it.")
    ] = 0.0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 for no limit.")] = 0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    kernels: Annotated[
        Kernels, typer.Option(help="packed: faster verification on a CPU, twice the memory.")
    ] = "stock",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: a GPU if there is one.")] = None,
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
