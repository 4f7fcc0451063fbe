"""SGLang as an engine that answers many prompts: it batches them itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capture_hooks.decoding.contract import Asked, Dialogue, Generated, Sampling
from capture_hooks.engines.prompts import DIALOGUES, converse
from capture_hooks.engines.server import Server

from .server import check_environment, running


class SGLangGeneration:
    """A server that answers; `generation` makes one."""

    name = "sglang"
    at_once = DIALOGUES

    def __init__(self, server: Server, sampling: Sampling) -> None:
        self._server, self._sampling = server, sampling

    @property
    def version(self) -> str:
        """SGLang's."""
        return str(self._server.info.get("version"))

    @property
    def settings(self) -> Mapping[str, str]:
        """As SGLang resolved them; it heeds the seed of an answer with deterministic inference alone."""
        names = [
            "device",
            "attention_backend",
            "sampling_backend",
            "dtype",
            "quantization",
            "tp_size",
            "dp_size",
        ]
        names += ["enable_deterministic_inference", "speculative_algorithm"]
        told = {name: self._server.info.get(name) for name in names}
        return {name: str(value) for name, value in told.items() if value is not None}

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer: six fewer than the model's in SGLang 0.5.23."""
        return int(self._server.info["max_req_input_len"])

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[list[tuple[Dialogue, Generated | None]]]:
        """See `capture_hooks.decoding.contract.GeneratingEngine.answers`."""
        return converse(self._ask, dialogues)

    def _ask(self, asked: Asked) -> Generated:
        chosen = self._sampling
        sampling = {
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": chosen.top_k or -1,
            "min_p": chosen.min_p,
            "repetition_penalty": chosen.repetition_penalty,
            "max_new_tokens": asked.max_new_tokens,
            "stop_token_ids": list(chosen.ends),
            "sampling_seed": asked.seed,
        }
        payload = {"input_ids": list(asked.prompt), "sampling_params": sampling}
        answer: Any = self._server.post("/generate", payload)
        finish = answer["meta_info"]["finish_reason"]
        return Generated(tuple(answer["output_ids"]), finish["type"] == "stop")


@contextmanager
def generation(model: Path, sampling: Sampling, words: Sequence[str]) -> Iterator[SGLangGeneration]:
    """Start SGLang; see `capture_hooks.engines.contract.EngineProvider.generate`."""
    check_environment()
    ours = ["--model-path", str(model)]
    fixed = ["--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "error"]
    with running([*ours, *words, *fixed], {}) as server:
        yield SGLangGeneration(server, sampling)
