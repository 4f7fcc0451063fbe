"""vLLM as a decoding engine: one prompt at a time, with a draft head or without."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from capture_hooks.engines.checks import check_target
from capture_hooks.engines.contract import Answer, Margin
from capture_hooks.engines.server import Server
from capture_hooks.errors import EngineError
from capture_hooks.target import load_config

from ..activate import HEAD
from ..launch import checks
from ..launch.command import drafting_of, without
from .server import check_environment, generate, running

#: Best tokens whose log-probabilities are compared: as many as vLLM gives unless told otherwise.
_BEST: Final = 20
#: All of drafting, which the server without a head must not get.
_DRAFTING: Final = ("speculation", "method", "draft", "steps")


class VllmDecoding:
    """A server that answers; `decode` makes one."""

    name = "vllm"

    def __init__(self, server: Server, ends: Sequence[int], *, drafts: bool) -> None:
        self._server, self._ends, self._drafts = server, list(ends), drafts

    @property
    def version(self) -> str:
        """vLLM's."""
        return str(self._server.info["version"])

    @property
    def settings(self) -> Mapping[str, str]:
        """How it decodes, as vLLM resolved it."""
        return {name: value for name, value in self._server.info.items() if name != "version"}

    @property
    def depth(self) -> int:
        """Drafted tokens of a round: a chain."""
        return int(self._server.info["num_speculative_tokens"]) if self._drafts else 0

    @property
    def drafted(self) -> int:
        """Drafted tokens verified in a round."""
        return self.depth

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Answer one prompt greedily.

        Raises:
            EngineError: vLLM refused it, or does not tell how it was drafted.
        """
        start = time.perf_counter()
        answer = self._ask(prompt, max_new_tokens)
        seconds = time.perf_counter() - start
        ids = tuple(answer["choices"][0]["token_ids"])
        if not self._drafts:
            return Answer(ids, 0, (), seconds)
        counts = _histogram(answer)
        # A pass that verified no drafts gained its one token: near the end of the context none are made.
        rounds = sum(counts)
        gained = rounds + sum(i * count for i, count in enumerate(counts))
        alone = max(0, len(ids) - 1 - gained)
        return Answer(ids, rounds + alone, (counts[0] + alone, *counts[1:]), seconds)

    def margin(self, prompt: Sequence[int], answer: Sequence[int]) -> Margin:
        """How far ahead the next token is, decoded a token at a time and in one pass over all before it."""
        decoded = self._ask(prompt, len(answer) + 1, logprobs=_BEST)
        at_once = self._ask([*prompt, *answer], 1, logprobs=_BEST)
        places = decoded["choices"][0]["logprobs"]["content"]
        single = _best(places[min(len(answer), len(places) - 1)])
        several = _best(at_once["choices"][0]["logprobs"]["content"][0])
        first, second, *_ = sorted(single.values(), reverse=True)
        return Margin(
            first - second, max(abs(single[t] - several[t]) for t in single.keys() & several.keys())
        )

    def _ask(self, prompt: Sequence[int], tokens: int, **options: Any) -> Any:
        return generate(self._server, prompt, tokens, stop_token_ids=self._ends, **options)


def _histogram(answer: Any) -> tuple[int, ...]:
    """For i = 0, 1, ...: rounds that accepted exactly i drafts; (0,) where there was no round."""
    told = (answer.get("metrics") or {}).get("speculative_decoding")
    if told is None:
        if len(answer["choices"][0]["token_ids"]) > 1:
            raise EngineError("vLLM answered without telling how many drafts it accepted")
        return (0,)
    return tuple(told["acceptance_histogram"])


def _best(place: Any) -> dict[int, float]:
    """Log-probabilities of the best tokens at one place of an answer."""
    return {int(one["token_id"]): float(one["logprob"]) for one in place["top_logprobs"]}


@contextmanager
def decode(model: Path, head: Path | None, words: Sequence[str]) -> Iterator[VllmDecoding]:
    """Start vLLM to draft with ``head``; see `capture_hooks.engines.contract.EngineProvider.decode`."""
    check_environment()
    # A second answer to the same prompt must cost what the first did.
    fixed = ["--no-enable-prefix-caching"]
    environment: dict[str, str] = {}
    if head is None:
        kept = without(words, _DRAFTING)
    else:
        check_target(checks.check_head(head, model, os.environ), model)
        kept, drafting = drafting_of(head, words)
        fixed += [*drafting, "--per-request-spec-decode-metrics", "summary"]
        environment[HEAD] = str(head)
    with running(model, kept, fixed, environment) as server:
        yield VllmDecoding(server, _ends(model), drafts=head is not None)


def _ends(model: Path) -> list[int]:
    """Token ids that end an answer, as transformers has them; vLLM without a tokenizer knows none."""
    from transformers import GenerationConfig

    try:
        told = GenerationConfig.from_pretrained(str(model)).eos_token_id
    except OSError:
        told = load_config(str(model)).eos_token_id
    return [told] if isinstance(told, int) else list(told or ())
