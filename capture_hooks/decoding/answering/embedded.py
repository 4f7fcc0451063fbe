"""The model in this process as an engine that answers many prompts: ``model.generate``, several rows a pass.

Blocks of dialogues are answered in waves: the first prompts of all of them, then the second ones, and so on.
What stands in a block, and which prompts of a wave run together, depends on the data alone.  So a run that
was interrupted computes what is left as it would have been computed: its answers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...errors import DecodingError
from ...target import context_length
from ..contract import Dialogue, Generated, PromptRequest, Sampling

#: Batches of dialogues in a block: among so many prompts, those of one length are found.
BLOCK: Final = 16
#: Frequencies of these kinds are chosen by the longest row of a pass.
_BY_LENGTH: Final = ("longrope", "dynamic")
#: Largest change of a logit by padding, as a share of the largest logit, that is rounding.
_ROUNDING: Final = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE: Final = 3e-2


class EmbeddedGeneration:
    """Answers by a model in this process.

    Prompts of several lengths run together, padded on the left, where a trial shows that padding changes
    nothing but rounding in this model; else only prompts of one length do, each row as it were alone.

    Args:
        model: the target, in eval mode, on its device.
        sampling: how tokens are chosen.
        at_once: most prompts in a pass.
    """

    name = "embedded"

    def __init__(self, model: Any, sampling: Sampling, at_once: int) -> None:
        self._model, self._sampling, self._at_once = model, sampling, at_once
        self._config = model.config.get_text_config()
        self._pads = at_once > 1 and sampling.repetition_penalty == 1 and self._padding_is_harmless()

    @property
    def version(self) -> str:
        """The version of transformers, whose ``generate`` writes the answers."""
        import transformers

        return f"transformers {transformers.__version__}"

    @property
    def settings(self) -> Mapping[str, str]:
        """What else may change an answer."""
        parameter = next(self._model.parameters())
        return {
            "torch": torch.__version__,
            "device": parameter.device.type,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "batch": f"{self._at_once} {'prompts' if self._pads else 'prompts of one length'}",
        }

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer."""
        return context_length(self._config)

    @property
    def at_once(self) -> int:
        """Most prompts in a pass."""
        return self._at_once

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
        """Answer all dialogues; see `capture_hooks.decoding.contract.GeneratingEngine.answers`."""
        waiting = iter(dialogues)
        while block := list(islice(waiting, BLOCK * self._at_once)):
            open_ = [] if all(dialogue.finished for dialogue in block) else block
            while open_:
                wave = [(d, asked) for d in open_ if (asked := d.asks()) is not None]
                for batch in self._batches([asked for _, asked in wave]):
                    chosen = [wave[at] for at in batch]
                    if all(asked.known for _, asked in chosen):
                        yield [(dialogue, None) for dialogue, _ in chosen]
                        continue
                    answers = self._generate([asked for _, asked in chosen])
                    yield [
                        (dialogue, None if asked.known else answer)
                        for (dialogue, asked), answer in zip(chosen, answers, strict=True)
                    ]
                open_ = [dialogue for dialogue, _ in wave]

    def _batches(self, wave: Sequence[PromptRequest]) -> Iterator[list[int]]:
        """Which prompts run together; long ones first, for those are what memory may not suffice for."""

        def kind(at: int) -> tuple[int, int]:
            asked = wave[at]
            return (asked.max_new_tokens, 0 if self._pads else len(asked.prompt))

        order = sorted(range(len(wave)), key=lambda at: (*kind(at), len(wave[at].prompt)), reverse=True)
        batch: list[int] = []
        for at in order:
            if batch and (len(batch) == self._at_once or kind(batch[0]) != kind(at)):
                yield batch
                batch = []
            batch.append(at)
        if batch:
            yield batch

    def _generate(self, asked: Sequence[PromptRequest]) -> list[Generated]:
        ids, mask = self._padded([one.prompt for one in asked])
        limit = asked[0].max_new_tokens
        try:
            with _settled(self._model), torch.inference_mode():
                written = self._model.generate(
                    ids,
                    attention_mask=mask,
                    generation_config=self._asked_config(limit),
                    logits_processor=self._processors([one.seed for one in asked], limit, ids.shape[1]),
                )
        except torch.OutOfMemoryError as error:
            raise DecodingError(
                f"no memory for {len(asked)} prompts of up to {ids.shape[1]} tokens with {limit} new ones: "
                f"answer fewer at a time (--batch-size), or shorter (--max-new-tokens); {error}"
            ) from None
        return [self._answer(row) for row in written[:, ids.shape[1] :].tolist()]

    def _answer(self, row: list[int]) -> Generated:
        end = next((at for at, token in enumerate(row) if token in self._sampling.ends), None)
        return Generated(tuple(row if end is None else row[: end + 1]), end is not None)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device, longest = next(self._model.parameters()).device, max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._padding)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        return ids.to(device), mask.to(device)

    @property
    def _padding(self) -> int:
        return self._sampling.ends[0] if self._sampling.ends else 0

    def _asked_config(self, limit: int, **more: Any) -> GenerationConfig:
        ends = list(self._sampling.ends) or None
        return GenerationConfig(  # type: ignore[no-untyped-call]  # transformers gives no types
            max_new_tokens=limit,
            do_sample=False,
            num_beams=1,
            eos_token_id=ends,
            pad_token_id=self._padding,
            **more,
        )

    def _processors(self, seeds: Sequence[int], limit: int, prompt: int) -> LogitsProcessorList:
        """As `generate` orders them (transformers 5.24, ``generation/utils.py``), and then the draw."""
        chosen, device = self._sampling, next(self._model.parameters()).device
        made: list[LogitsProcessor] = []
        if chosen.repetition_penalty != 1:
            made.append(RepetitionPenaltyLogitsProcessor(chosen.repetition_penalty))
        if chosen.temperature:
            made.append(TemperatureLogitsWarper(chosen.temperature))
            if chosen.top_k:
                made.append(TopKLogitsWarper(chosen.top_k))
            if chosen.top_p < 1:
                made.append(TopPLogitsWarper(chosen.top_p))
            if chosen.min_p:
                made.append(MinPLogitsWarper(chosen.min_p))
            made.append(_Drawn(seeds, limit, prompt, device))
        return LogitsProcessorList(made)

    def _padding_is_harmless(self) -> bool:
        """Whether a row's numbers are the same beside a longer one, rounding apart."""
        if _rope_kinds(getattr(self._config, "rope_parameters", None)) & set(_BY_LENGTH):
            return False
        short, long = ([5 + (3 * at) % 40 for at in range(length)] for length in (9, 25))
        try:
            alone = self._logits([short])[:, 0]
            padded = self._logits([short, long])[:, 0]
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, NotImplementedError):
            return False  # a class that takes no padding, or not these tokens
        allowed = _ROUNDING.get(self._model.dtype, _COARSE) * float(alone.abs().max())
        return bool(((padded - alone).abs() <= allowed).all())

    def _logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [2, B, V] of the first two new tokens, both times after the token 5."""
        ids, mask = self._padded(prompts)
        config = self._asked_config(2, output_logits=True, return_dict_in_generate=True, min_new_tokens=2)
        with _settled(self._model), torch.inference_mode():
            made = self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([_Always(5)]),
            )
        return torch.stack(list(made.logits)).double()


class _Drawn(LogitsProcessor):
    """Leaves of each row the one token that its own random numbers draw: batch-mates change no draw."""

    def __init__(self, seeds: Sequence[int], limit: int, prompt: int, device: torch.device) -> None:
        draws = [
            torch.rand(limit, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in seeds
        ]
        self._draws, self._prompt = torch.stack(draws).to(device), prompt

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        step = input_ids.shape[1] - self._prompt
        sums = scores.double().softmax(-1).cumsum(-1)
        # The last sum may miss 1 by rounding, and the draw may be rounded to it: never behind the last token
        # that has a probability.
        whole = sums[:, -1:].contiguous()
        drawn = torch.searchsorted(sums, self._draws[:, step, None] * whole, right=True)
        drawn = drawn.minimum(torch.searchsorted(sums, whole))
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


class _Always(LogitsProcessor):
    """Chooses one token whatever the scores are."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, self._token] = 0.0
        return chosen


@contextmanager
def _settled(model: Any) -> Iterator[None]:
    """Remove the model's generation settings, from which `generate` would fill in what is left open."""
    own = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # transformers gives no types
    try:
        yield
    finally:
        model.generation_config = own


def _rope_kinds(parameters: Any) -> set[str]:
    """All kinds of rotary embedding that a config names, those of layer types too."""
    if not isinstance(parameters, Mapping):
        return set()
    found = {str(parameters.get("rope_type", "default"))}
    return found.union(*(_rope_kinds(value) for value in parameters.values()))
