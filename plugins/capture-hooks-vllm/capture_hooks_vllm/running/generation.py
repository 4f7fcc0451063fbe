"""vLLM as an engine that answers many prompts: it batches them itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from capture_hooks.decoding.contract import Asked, Dialogue, Generated, Sampling
from capture_hooks.engines.prompts import DIALOGUES, converse
from capture_hooks.engines.server import Server

from .server import check_environment, generate, running


class VllmGeneration:
    """A server that answers; `generation` makes one."""

    name = "vllm"
    at_once = DIALOGUES

    def __init__(self, server: Server, sampling: Sampling) -> None:
        self._server, self._sampling = server, sampling

    @property
    def version(self) -> str:
        """vLLM's."""
        return str(self._server.info["version"])

    @property
    def settings(self) -> Mapping[str, str]:
        """As vLLM resolved them."""
        return {name: value for name, value in self._server.info.items() if name != "version"}

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return int(self._server.info["max_model_len"])

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
        """See `capture_hooks.decoding.contract.GeneratingEngine.answers`."""
        return converse(self._ask, dialogues)

    def _ask(self, asked: Asked) -> Generated:
        chosen = self._sampling
        answer = generate(
            self._server,
            asked.prompt,
            asked.max_new_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k or 0,
            min_p=chosen.min_p,
            repetition_penalty=chosen.repetition_penalty,
            seed=asked.seed if chosen.temperature else None,
            stop_token_ids=list(chosen.ends),
        )["choices"][0]
        return Generated(tuple(answer["token_ids"]), answer["finish_reason"] == "stop")


@contextmanager
def generation(model: Path, sampling: Sampling, words: Sequence[str]) -> Iterator[VllmGeneration]:
    """Start vLLM; see `capture_hooks.engines.contract.EngineProvider.generate`."""
    check_environment()
    with running(model, words, [], {}) as server:
        yield VllmGeneration(server, sampling)
