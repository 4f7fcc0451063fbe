"""vLLM as a capture engine: prompts over HTTP, states through files that its own extraction writes."""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from capture_hooks.engines.contract import SequenceError, SequenceStates
from capture_hooks.engines.prompts import in_flight
from capture_hooks.engines.server import GoneError, Server
from capture_hooks.errors import EngineError
from capture_hooks.spec import CaptureSpec
from capture_hooks.target import final_norm_of, hollow_anatomy

from ..launch.flags import read_flags, spelling
from ..launch.installed import VLLM
from .extraction import Extraction, extraction, model_type_of
from .server import check_environment, context_of, generate, running

#: Places beyond a model's context: the token that is generated and the one that stands for a draft.
_BEYOND: Final = 16
#: Flags that are decided here.
_OURS: Final = ("speculation", "method", "draft", "steps", "connector")


class VllmCapture:
    """A server that leaves the states of whole prompts in files; `capture` makes one."""

    name = "vllm"

    def __init__(self, server: Server, model: Path, plan: Extraction) -> None:
        self._server, self._model, self._plan = server, model, plan
        self._norm: torch.nn.Module | None = None

    @property
    def version(self) -> str:
        """vLLM's."""
        return str(self._server.info["version"])

    @property
    def batch_tokens(self) -> int:
        """Most tokens in one forward."""
        return int(self._server.info["max_num_batched_tokens"])

    @property
    def settings(self) -> Mapping[str, str]:
        """What else changes the bits."""
        apart = ("version", "max_num_batched_tokens", "num_speculative_tokens")
        return {name: value for name, value in self._server.info.items() if name not in apart}

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[SequenceStates]:
        """Prefill every sequence; its states as they become ready, in any order.

        Raises:
            SequenceError: a sequence that vLLM refused, or whose rows are not as many as its tokens.
            EngineError: the server is gone; with its last words.
        """
        for _, states in in_flight(self._run, sequences, self.batch_tokens):
            yield states

    def _run(self, number: int, sequence: Sequence[int]) -> SequenceStates:
        """One sequence's states."""
        tokens = [int(token) for token in sequence]
        try:
            # One token is the least that vLLM generates; it is the greedy one behind the last.
            answer = generate(self._server, tokens, 1, prompt_logprobs=1, ignore_eos=True)
            states = self._collect(answer, tokens)
            inputs, target = self._plan.split(states, self._normed(states.dtype))
            return SequenceStates(number, inputs, target, _greedy(answer, tokens))
        except GoneError:
            raise
        except EngineError as error:
            raise SequenceError(number, str(error)) from None

    def _collect(self, answer: Any, tokens: list[int]) -> Tensor:
        """States [T, K, H] from the file of an answered request, which is removed."""
        told = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if told is None:
            raise EngineError("vLLM answered without extracting states")
        path, lock = Path(told), Path(f"{told}.lock")
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # held by the worker until the file is complete
                found = load_file(path)
            path.unlink()
            lock.unlink()
        except (OSError, SafetensorError) as error:
            if not self._server.alive:
                raise GoneError(self._server.obituary()) from None
            raise EngineError(f"vLLM's file of states cannot be read: {error}") from None
        if found["token_ids"].tolist() != tokens:
            raise EngineError(f"states of {len(found['token_ids'])} other tokens came for its {len(tokens)}")
        states = found["hidden_states"]
        if states.shape[:2] != (len(tokens), len(self._plan.ids)):
            raise EngineError(
                f"states of shape {list(states.shape)} came for {len(tokens)} tokens and "
                f"{len(self._plan.ids)} layer ids"
            )
        return states

    def _normed(self, dtype: torch.dtype) -> torch.nn.Module | None:
        """The target's final norm in the engine's dtype, where the plan needs it."""
        if self._norm is None and self._plan.normed:
            self._norm = final_norm_of(str(self._model), dtype)
        return self._norm


def _greedy(answer: Any, tokens: list[int]) -> Tensor:
    """[T] the greedy token behind each: the prompt's best log-probabilities, then the generated token."""
    behind = [_best(place) for place in answer["prompt_logprobs"][1:]]
    (generated,) = answer["choices"][0]["token_ids"]
    if len(behind) + 1 != len(tokens):
        raise EngineError(f"log-probabilities of {len(behind) + 1} tokens came for its {len(tokens)}")
    return torch.tensor([*behind, generated])


def _best(place: Mapping[str, Any]) -> int:
    return next(int(token) for token, told in place.items() if told["rank"] == 1)


@contextmanager
def capture(model: Path, spec: CaptureSpec, words: Sequence[str]) -> Iterator[VllmCapture]:
    """Start vLLM on ``model`` to capture ``spec``; see `capture_hooks.engines.contract.EngineProvider`."""
    check_environment()
    flags = read_flags(words)
    if refused := [spelling(name) for name in _OURS if name in flags]:
        raise EngineError(f"{', '.join(refused)}: a dump sets it to extract hidden states; leave it out")
    anatomy = hollow_anatomy(str(model))
    plan = extraction(anatomy, spec, model_type_of(anatomy), VLLM.version())
    with tempfile.TemporaryDirectory(prefix="capture-hooks-states-") as folder:
        fixed = ["--no-enable-prefix-caching", *_extracting(plan, folder)]
        own, environment = context_of(model, _BEYOND)
        with running(model, [*own, *words], fixed, environment) as server:
            yield VllmCapture(server, model, plan)


def _extracting(plan: Extraction, folder: str) -> list[str]:
    drafting = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(plan.ids)}},
    }
    transfer = {
        "kv_connector": "HiddenStatesConnector",
        "kv_connector_module_path": "capture_hooks_vllm.running.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }
    return ["--speculative-config", json.dumps(drafting), "--kv-transfer-config", json.dumps(transfer)]
