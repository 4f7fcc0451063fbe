"""SGLang as a decoding engine: one prompt at a time, with a draft head or without."""

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

from ..launch import checks
from ..launch.command import compose
from ..launch.flags import named
from .server import check_environment, check_reports, running

#: Best tokens whose log-probabilities are compared.
_BEST: Final = 20


class SGLangDecoding:
    """A server that answers; `decode` makes one."""

    name = "sglang"

    def __init__(self, server: Server, *, drafts: bool) -> None:
        self._server, self._drafts = server, drafts

    @property
    def version(self) -> str:
        """SGLang's."""
        return str(self._server.info.get("version"))

    @property
    def settings(self) -> Mapping[str, str]:
        """How it decodes, as SGLang resolved it."""
        names = ["device", "attention_backend", "dtype", "quantization", "tp_size", "dp_size"]
        if self._drafts:
            names += ["speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk"]
            names += ["speculative_num_draft_tokens"]
        told = {name: self._server.info.get(name) for name in names}
        return {name: str(value) for name, value in told.items() if value is not None}

    @property
    def depth(self) -> int:
        """Drafted tokens on the longest path of a round."""
        return int(self._server.info["speculative_num_steps"]) if self._drafts else 0

    @property
    def drafted(self) -> int:
        """Drafted tokens verified in a round; the first of SGLang's is the target's own."""
        return int(self._server.info["speculative_num_draft_tokens"]) - 1 if self._drafts else 0

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """Answer one prompt greedily."""
        start = time.perf_counter()
        answer = self._ask(prompt, max_new_tokens)
        seconds = time.perf_counter() - start
        told = answer["meta_info"]
        return Answer(
            tuple(answer["output_ids"]),
            int(told.get("spec_verify_ct", 0)),
            tuple(told.get("spec_correct_drafts_histogram", ())),
            seconds,
        )

    def margin(self, prompt: Sequence[int], answer: Sequence[int]) -> Margin:
        """How far ahead the next token is, decoded a token at a time and in one pass over all before it."""
        options = {"return_logprob": True, "top_logprobs_num": _BEST}
        decoded = self._ask(prompt, len(answer) + 1, **options)
        at_once = self._ask([*prompt, *answer], 1, **options)
        single = _best(decoded, min(len(answer), len(decoded["output_ids"]) - 1))
        several = _best(at_once, 0)
        first, second, *_ = sorted(single.values(), reverse=True)
        return Margin(
            first - second, max(abs(single[t] - several[t]) for t in single.keys() & several.keys())
        )

    def _ask(self, prompt: Sequence[int], tokens: int, **options: Any) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": tokens}
        payload = {"input_ids": [int(token) for token in prompt], "sampling_params": sampling, **options}
        return self._server.post("/generate", payload)


def _best(answer: Any, at: int) -> dict[int, float]:
    """Log-probabilities of the best tokens at one place of an answer."""
    return {int(token): float(value) for value, token, *_ in answer["meta_info"]["output_top_logprobs"][at]}


@contextmanager
def decode(model: Path, head: Path | None, words: Sequence[str]) -> Iterator[SGLangDecoding]:
    """Start SGLang to draft with ``head``; see `capture_hooks.engines.contract.EngineProvider.decode`."""
    if any(named(word.partition("=")[0]) == "config" for word in words):
        raise EngineError(
            "--config FILE may hold settings of drafting, which the server without a head must not get; give "
            "the flags themselves"
        )
    check_environment()
    if head is None:
        line = ["--model-path", str(model), *_without_drafting(words)]
    else:
        asked = checks.check_head(head, model, os.environ)
        assert asked.head is not None
        check_target(asked.head, model)
        line = list(compose(head, model, words).argv[3:])  # behind ``python -m sglang.launch_server``
    # A second answer to the same prompt must cost what the first did.
    fixed = ["--disable-radix-cache", "--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "error"]
    with running([*line, *fixed], {}) as server:
        if head is not None:
            check_reports(server)
        yield SGLangDecoding(server, drafts=head is not None)


def _without_drafting(words: Sequence[str]) -> list[str]:
    """The user's flags without those that only a draft head needs."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.startswith("--speculative-")
        if not dropping:
            kept.append(word)
    return kept
