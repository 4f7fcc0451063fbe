"""What a head is worth in an engine: the report of the embedded decoder, as far as the engine tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..decoding.evaluation import Divergence, EvalReport, Timing
from ..decoding.prompts import Prompt
from ..decoding.stats import DecodeStats
from ..errors import DataError
from .contract import Answer, DecodingEngine, EngineProvider


def evaluate_engine(
    provider: EngineProvider,
    model: Path,
    head: Path,
    settings: Sequence[str],
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> EvalReport:
    """Decode prompts greedily by an engine with a head, then by the same engine without one, and compare.

    One after the other, for a device may not hold two engines: a machine that slows down in between shows in
    the ratio.  There is no offline acceptance, which needs the target in this process.

    Args:
        provider: the engine.
        model: the target.
        head: its draft head.
        settings: the user's words for the engine.
        prompts: what to decode.
        max_new_tokens: most tokens of an answer.
        on_progress: called with what is being done, how many are done and how many there are.

    Raises:
        EngineError: the engine does not start, refuses the head, or breaks off.
        DataError: for no prompts.
    """
    if not prompts:
        raise DataError("there are no prompts to decode")
    report = on_progress or (lambda what, done, total: None)
    with provider.decode(model, head, settings) as engine:
        drafting = _answers(engine, prompts, max_new_tokens, "decoding", report)
        stats = _stats(engine, [answer for answer, _ in drafting])
        told = {"engine": engine.name, "version": engine.version, **engine.settings}
    with provider.decode(model, None, settings) as engine:
        plain = _answers(engine, prompts, max_new_tokens, "without a head", report)
        divergences = [
            parted
            for prompt, (ours, _), (reference, _) in zip(prompts, drafting, plain, strict=True)
            if (parted := _compare(engine, prompt, ours, reference)) is not None
        ]
    timings = tuple(
        Timing(
            plain_tokens=len(reference.token_ids),
            plain_seconds=reference.seconds,
            tokens=len(ours.token_ids),
            seconds=ours.seconds,
            prefill_seconds=prefill,
            rounds=ours.rounds,
        )
        for (ours, prefill), (reference, _) in zip(drafting, plain, strict=True)
    )
    told |= {"max_new_tokens": str(max_new_tokens)}
    return EvalReport(None, stats, timings, tuple(divergences), dict(told), f"{provider.name} without a head")


def _answers(
    engine: DecodingEngine,
    prompts: Sequence[Prompt],
    new: int,
    what: str,
    report: Callable[[str, int, int], None],
) -> list[tuple[Answer, float]]:
    """Each prompt's answer, and the seconds that its first token alone takes."""
    engine.answer(prompts[0].token_ids.tolist(), 4)  # not timed: first calls allocate and compile
    found = []
    for prompt in prompts:
        tokens = prompt.token_ids.tolist()
        prefill = engine.answer(tokens, 1).seconds
        found.append((engine.answer(tokens, new), prefill))
        report(what, len(found), len(prompts))
    return found


def _stats(engine: DecodingEngine, answers: Sequence[Answer]) -> DecodeStats:
    """Acceptance from counts: how many rounds accepted exactly 0, 1, 2, … drafted tokens."""
    total = DecodeStats()
    for answer in answers:
        counts = [*answer.accepted, *[0] * (engine.depth + 1 - len(answer.accepted))]
        total += DecodeStats(
            sequences=1,
            rounds=answer.rounds,
            tokens=len(answer.token_ids) - 1,  # the first is the prefill's
            drafted=answer.rounds * engine.drafted,
            reached=tuple(sum(counts[i:]) for i in range(engine.depth)),
            accepted=tuple(sum(counts[i + 1 :]) for i in range(engine.depth)),
        )
    return total


def _compare(engine: DecodingEngine, prompt: Prompt, ours: Answer, reference: Answer) -> Divergence | None:
    """None where two answers are the same, else where they part and how sure the engine's own choice is."""
    a, b = ours.token_ids, reference.token_ids
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    margin = engine.margin(prompt.token_ids.tolist(), b[:at])
    return Divergence(
        prompt.source,
        at,
        a[at] if at < len(a) else None,
        b[at] if at < len(b) else None,
        margin.gap,
        margin.noise,
    )
