"""What a head is worth: acceptance, speed against `model.generate` in the same run, and the same answers."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Anatomy, bind
from ..errors import DataError
from ..heads.contract import DraftHead, TrainBatch
from ..heads.drafting import Proposal
from ..store.data import Media
from ..target.states import placed, run_with_images
from .decoder import SpeculativeDecoder
from .prompts import Prompt
from .stats import DecodeStats
from .target import Target


@dataclass(frozen=True, slots=True)
class Timing:
    """One prompt decoded both ways, seconds by the same clock."""

    plain_tokens: int
    plain_seconds: float
    tokens: int
    seconds: float
    prefill_seconds: float
    rounds: int


@dataclass(frozen=True, slots=True)
class EvalReport:
    """The result of `evaluate`, or of `evaluate_engine`.

    Attributes:
        offline: teacher-forced acceptance, None where no prompt had an answer.
        stats: acceptance while decoding greedily.
        timings: one entry per prompt.
        divergences: prompts whose answer was not the one without a head, excused or not.
        settings: how it was decoded.
        plain: what decoded without a head.
    """

    offline: OfflineAcceptance | None
    stats: DecodeStats
    timings: tuple[Timing, ...]
    divergences: tuple[Divergence, ...]
    settings: dict[str, Any]
    plain: str = "model.generate"

    @property
    def prompts(self) -> int:
        return len(self.timings)

    @property
    def identical(self) -> int:
        """Prompts whose answer is token for token the one without a head."""
        return self.prompts - len(self.divergences)

    @property
    def lossless(self) -> bool:
        """Whether every divergence lies below the target's own numerical noise."""
        return all(divergence.excused for divergence in self.divergences)

    @property
    def plain_tokens_per_second(self) -> float:
        """Tokens per second of the target alone, the pass over the prompt included."""
        return sum(t.plain_tokens for t in self.timings) / sum(t.plain_seconds for t in self.timings)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of speculative decoding, the pass over the prompt included."""
        return sum(t.tokens for t in self.timings) / sum(t.seconds for t in self.timings)

    @property
    def speedup(self) -> float:
        """Ratio of the two rates."""
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def speedup_interval(self) -> tuple[float, float] | None:
        """95 % interval of the speed-up, from the spread over prompts; None for fewer than 3."""
        logs = [math.log((t.tokens / t.seconds) / (t.plain_tokens / t.plain_seconds)) for t in self.timings]
        if len(logs) < 3:
            return None
        middle, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        # Two standard errors, widened for few prompts as Student's t is (within 2 % of it from 3 on).
        reach = error * (1.96 + 2.4 / (len(logs) - 1) + 4.3 / (len(logs) - 1) ** 2)
        return math.exp(middle - reach), math.exp(middle + reach)

    @property
    def step_seconds(self) -> float:
        """Cost of one plain decoding step, the prompt's pass taken out."""
        steps = sum(t.plain_tokens - 1 for t in self.timings)
        seconds = sum(t.plain_seconds - t.prefill_seconds for t in self.timings)
        return seconds / steps if steps else float("nan")

    @property
    def round_seconds(self) -> float:
        """Cost of one speculative round, the prompt's pass taken out."""
        rounds = sum(t.rounds for t in self.timings)
        seconds = sum(t.seconds - t.prefill_seconds for t in self.timings)
        return seconds / rounds if rounds else float("nan")

    @property
    def break_even(self) -> float:
        """Acceptance length at which speculation costs what plain decoding does: a round over a step."""
        return self.round_seconds / self.step_seconds

    def table(self) -> list[tuple[str, str]]:
        """The report as rows of label and value, for a terminal."""
        stats, depth = self.stats, len(self.stats.reached)
        rows = []
        if self.offline is not None:
            rows.append(("offline acceptance (teacher-forced)", _shares(self.offline.acceptance)))
        rows.append((f"acceptance decoding, positions 1-{depth}", _shares(stats.conditional_acceptance)))
        rows.append(("mean acceptance length", f"{stats.acceptance_length:.2f} tokens a round"))
        rows.append(("break-even acceptance length", f"{self.break_even:.2f} (cost of a round / plain step)"))
        rows.append((f"tokens/s, {self.plain}", f"{self.plain_tokens_per_second:.1f}"))
        spread = self.speedup_interval
        between = "" if spread is None else f", 95 % between {spread[0]:.2f} and {spread[1]:.2f}"
        rows.append(("tokens/s, speculative", f"{self.tokens_per_second:.1f} ({self.speedup:.2f}x{between})"))
        rows.append(("identical", f"{self.identical}/{self.prompts}"))
        for divergence in self.divergences:
            rows.append((f"  differs: {divergence.source}", str(divergence)))
        return rows

    def to_json(self) -> dict[str, Any]:
        """The report as plain values for JSON; NaN becomes null."""
        return {
            "settings": self.settings,
            "offline": None if self.offline is None else self.offline.to_json(),
            "decoding": self.stats.to_json(),
            "prompts": self.prompts,
            "identical": self.identical,
            "lossless": self.lossless,
            "divergences": [divergence.to_json() for divergence in self.divergences],
            "tokens_per_second": _number(self.tokens_per_second),
            "plain_tokens_per_second": _number(self.plain_tokens_per_second),
            "speedup": _number(self.speedup),
            "speedup_interval": self.speedup_interval,
            "step_seconds": _number(self.step_seconds),
            "round_seconds": _number(self.round_seconds),
            "break_even": _number(self.break_even),
        }


def evaluate(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> EvalReport:
    """Decode prompts greedily both ways, one after the other, and compare.

    Plain decoding is `model.generate(do_sample=False)`.  Which of the two goes first alternates, so that a
    machine that slows down or speeds up favours neither.

    Args:
        decoder: the decoder to evaluate.
        prompts: what to decode; answered ones also give offline acceptance.
        max_new_tokens: most tokens of an answer.
        clock: seconds; `time.process_time` on one thread is blind to other load on the machine.
        on_progress: called with what is being done, how many are done and how many there are.

    Raises:
        DecodingError: for a prompt that does not fit the context.
        DataError: for no prompts.
    """
    report = on_progress or (lambda what, done, total: None)
    answered = [
        (p.answered, p.loss_mask) for p in prompts if p.answered is not None and p.loss_mask is not None
    ]
    media = [p.answered_media for p in prompts if p.answered is not None and p.loss_mask is not None]
    offline = None
    if answered:
        offline = offline_acceptance(
            decoder.model,
            decoder.head,
            answered,
            media=media,
            anatomy=decoder.anatomy,
            on_progress=lambda done: report("offline", done, len(answered)),
        )
    stats, timings, divergences = DecodeStats(), [], []
    _warm_up(decoder, prompts[0])
    for at, prompt in enumerate(prompts):
        timing, ours, reference, one = _both(decoder, prompt, max_new_tokens, clock, plain_first=at % 2 == 0)
        stats += one
        timings.append(timing)
        parted = compare(
            decoder.target,
            prompt.token_ids,
            ours,
            reference,
            decoder.longest_pass,
            prompt.source,
            inputs=None if torch.equal(ours, reference) else _resolved(decoder, prompt),
        )
        if parted is not None:
            divergences.append(parted)
        report("decoding", at + 1, len(prompts))
    settings = {**decoder.settings(), "max_new_tokens": max_new_tokens, "threads": torch.get_num_threads()}
    return EvalReport(offline, stats, tuple(timings), tuple(divergences), settings)


def _both(
    decoder: SpeculativeDecoder,
    prompt: Prompt,
    new: int,
    clock: Callable[[], float],
    plain_first: bool,
) -> tuple[Timing, Tensor, Tensor, DecodeStats]:
    ids = prompt.token_ids[None].to(decoder.target.device)
    images = _images(decoder, prompt)

    def plain() -> tuple[Tensor, float]:
        decoder.anatomy.lengths.forget()
        start = clock()
        out = decoder.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, **images
        )
        answer: Tensor = out[0, ids.shape[1] :].cpu()  # waits for the device
        return answer, clock() - start

    first = plain() if plain_first else None
    start = clock()
    rounds = []
    prefill = 0.0
    for step in decoder.stream(ids, new, do_sample=False, **images):
        rounds.append(step)
        if len(rounds) == 1:
            prefill = clock() - start
    seconds = clock() - start
    reference, plain_seconds = first or plain()
    ours = torch.tensor([token for step in rounds for token in step.tokens])
    timing = Timing(len(reference), plain_seconds, len(ours), seconds, prefill, len(rounds) - 1)
    return timing, ours, reference, DecodeStats.of(rounds[1:], rounds[0].verify_seconds)


def _warm_up(decoder: SpeculativeDecoder, prompt: Prompt) -> None:
    """Run once before anything is timed: first calls allocate, pick kernels and compile."""
    ids, images = prompt.token_ids[None].to(decoder.target.device), _images(decoder, prompt)
    decoder.generate(ids, 4, do_sample=False, **images)
    decoder.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2, **images
    )


def _images(decoder: SpeculativeDecoder, prompt: Prompt) -> dict[str, Any]:
    """What ``generate`` is given of a prompt's images beside its token ids."""
    if prompt.media is None:
        return {}
    made = placed(decoder.anatomy.model, prompt.media.inputs(), decoder.target.device)
    return {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}


def _resolved(decoder: SpeculativeDecoder, prompt: Prompt) -> Mapping[str, Any] | None:
    """What the prompt's pass is given of its images."""
    if prompt.media is None:
        return None
    images = _images(decoder, prompt)
    return decoder.prepare(prompt.token_ids.to(decoder.target.device), 1, **images).inputs


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two greedy answers part.

    Attributes:
        source: which prompt.
        position: index in the answer.
        ours, reference: the two tokens (None: that answer ended here).
        gap: the target's best logit minus its second best, one row at a time.
        noise: largest change of any logit there between one row and several rows in a pass.
    """

    source: str
    position: int
    ours: int | None
    reference: int | None
    gap: float
    noise: float

    @property
    def excused(self) -> bool:
        """Whether the gap lies below the target's own noise."""
        return self.gap < self.noise

    def __str__(self) -> str:
        verdict = "below" if self.excused else "ABOVE"
        return (
            f"token {self.position + 1}: {self.ours} instead of {self.reference}; the target's top-two gap "
            f"{self.gap:.2g} is {verdict} its own noise {self.noise:.2g}"
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        return {
            "source": self.source,
            "position": self.position,
            "ours": self.ours,
            "reference": self.reference,
            "gap": self.gap,
            "noise": self.noise,
            "excused": self.excused,
        }


def compare(
    target: Target,
    prompt: Tensor,
    ours: Tensor,
    reference: Tensor,
    rows: int,
    source: str = "",
    *,
    inputs: Mapping[str, Any] | None = None,
) -> Divergence | None:
    """None where two greedy answers are the same, else where they part, and whether rounding may explain it.

    A pass over several tokens uses other kernels than a pass over one, so two nearly equal logits may change
    places.  The excuse is granted only where the target's own numbers give it: the gap between its two best
    logits at the first differing token must be smaller than the difference that the number of rows in the
    pass makes to its logits at that very place.

    Args:
        target: the decoder's target; its sequence is replaced.
        prompt: [N] token ids.
        ours: answer [T].
        reference: the target's own answer [U].
        rows: most rows of a verification pass.
        source: the prompt's name in the result.
        inputs: `Request.inputs` of a prompt with images; the others are run as text.
    """
    a, b = ours.tolist(), reference.tolist()
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    # The pass over images cannot be divided: what is run in several ways comes after it.
    shown = prompt.tolist() if inputs else []
    context = [] if inputs else prompt.tolist()
    context += b[:at]
    single = _logits(target, shown, context, 1, inputs)
    best = single.topk(2).values
    most = target.anatomy.lengths.most_rows
    # More rows in a pass than the target computes alike would show more than rounding.
    length = len(shown) + len(context)
    counts = (n for n in range(2, rows + 1) if n <= (most(max(length - n, 0)) or n))
    others = (_logits(target, shown, context, n, inputs) for n in counts)
    noise = max((float((other - single).abs().max()) for other in others), default=0.0)
    return Divergence(
        source,
        at,
        a[at] if at < len(a) else None,
        b[at] if at < len(b) else None,
        float(best[0] - best[1]),
        noise,
    )


@torch.inference_mode()
def _logits(
    target: Target, shown: list[int], context: list[int], rows: int, inputs: Mapping[str, Any] | None
) -> Tensor:
    """[V] logits after ``shown + context``, the last ``rows`` tokens in one pass over a cache of the others.

    ``shown`` is run in a pass of its own with ``inputs``; at most what follows it is in the last one.
    """
    rows = min(rows, len(context) if shown else len(context) - 1)
    target.start(len(shown) + len(context), inputs)
    before, last = context[: len(context) - rows], context[len(context) - rows :]
    for tokens in (shown, before, last):
        if not tokens:
            continue
        if target.length == 0:
            logits, _ = target.prefill(torch.tensor([tokens], device=target.device))
        else:
            root, *rest = tokens
            chain = Proposal.chain(rest)
            logits, _ = target.verify(root, chain)
            if tokens is not last:
                target.commit(chain, range(1, len(tokens)))
    return logits[-1].float()


@dataclass(frozen=True, slots=True)
class OfflineAcceptance:
    """Counts over teacher-forced rows, position by position.

    Position i is the i-th token a head proposes behind a row, with the data's own tokens before it (a head
    that goes step by step has been fed its own outputs i times).  So the figure is conditional on the
    positions before it as far as tokens go.
    """

    hits: tuple[float, ...]
    rows: tuple[float, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of rows whose draft arg-max is the target's greedy token."""
        return tuple(h / r if r else float("nan") for h, r in zip(self.hits, self.rows, strict=True))

    def to_json(self) -> dict[str, Any]:
        """The fields as plain values for JSON."""
        acceptance = [h / r if r else None for h, r in zip(self.hits, self.rows, strict=True)]
        return {"acceptance": acceptance, "rows": list(self.rows)}


def offline_acceptance(
    model: nn.Module,
    head: DraftHead,
    sequences: Sequence[tuple[Tensor, Tensor]],
    *,
    media: Sequence[Media | None] | None = None,
    anatomy: Anatomy | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> OfflineAcceptance:
    """Run target and head over answered conversations.

    Args:
        model: the target.
        head: its head; asked in eval mode, left in the mode it was in.
        sequences: token ids [T] and loss masks [T] (bool, the answers' tokens).
        media: the images of each sequence.
        anatomy: the target's parts, if known.
        on_progress: called with the number of sequences done.

    Raises:
        DataError: when there is no sequence.
    """
    if not sequences:
        raise DataError("offline acceptance needs answered conversations, and there is none")
    capture = bind(model, head.spec, target=True, anatomy=anatomy)
    device: Any = capture.anatomy.embedding.weight.device
    was_training = head.training
    head.eval()
    hits = rows = None
    try:
        with torch.no_grad():
            for done, (ids, mask) in enumerate(sequences, start=1):
                capture.anatomy.lengths.forget()
                shown = media[done - 1] if media is not None else None
                with capture:
                    if shown is not None:
                        run_with_images(model, shown.inputs(), device)
                    else:
                        capture.run(input_ids=ids[None].to(device), stop=True)
                states = capture.states
                sums = head(
                    TrainBatch(
                        states=states.packed,
                        target=states.target,
                        token_ids=ids.to(device),
                        loss_mask=mask.to(device),
                        starts=torch.tensor([0, len(ids)], device=device),
                    )
                )
                hits = sums.hits if hits is None else hits + sums.hits
                rows = sums.rows if rows is None else rows + sums.rows
                if on_progress is not None:
                    on_progress(done)
    finally:
        head.train(was_training)
    assert hits is not None
    assert rows is not None
    return OfflineAcceptance(tuple(hits.tolist()), tuple(rows.tolist()))
