"""SGLang as a capture engine: prompts over HTTP, states through files, matched by request id."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capture_hooks.engines.contract import SequenceError, SequenceStates
from capture_hooks.engines.prompts import in_flight
from capture_hooks.engines.server import GoneError, Server
from capture_hooks.errors import EngineError, ModelError
from capture_hooks.spec import CaptureSpec
from capture_hooks.target import context_length, load_config

from ..launch.flags import read_flags
from ..serving.asked import SPEC, SPOOL
from ..serving.spooled import Rows, SpoolId
from .server import check_environment, check_reports, running

#: Seconds after its answer within which a request's states must be there.
_PATIENCE: Final = 60.0
#: Places beyond a model's context: SGLang keeps a few of those it has from prompts (6 in 0.5.23).
_BEYOND: Final = 16
#: What lets SGLang have them.
ROOM: Final = MappingProxyType({"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})


class SGLangCapture:
    """A server that leaves the states of whole prompts in a spool; `capture` makes one."""

    name = "sglang"

    def __init__(self, server: Server, spool: Path) -> None:
        self._server, self._spool = server, spool
        self._numbers = itertools.count()

    @property
    def version(self) -> str:
        """SGLang's."""
        return str(self._server.info.get("version"))

    @property
    def batch_tokens(self) -> int:
        """Most tokens in one forward."""
        chunk = int(self._server.info.get("chunked_prefill_size") or 0)
        return chunk if chunk > 0 else int(self._server.info["max_prefill_tokens"])

    @property
    def settings(self) -> Mapping[str, str]:
        """What else changes the bits."""
        import torch

        names = ("device", "attention_backend", "dtype", "quantization", "tp_size", "dp_size")
        told = {name: self._server.info.get(name) for name in names}
        return {"torch": torch.__version__} | {k: str(v) for k, v in told.items() if v is not None}

    def states(self, sequences: Sequence[Sequence[int]]) -> Iterator[SequenceStates]:
        """Prefill every sequence; its states as they become ready, in any order.

        Raises:
            SequenceError: a sequence that SGLang refused, or whose rows are not as many as its tokens.
            EngineError: the server is gone; with its last words.
        """
        for number, rows in in_flight(self._run, sequences, self.batch_tokens):
            yield SequenceStates(number, rows.inputs, rows.target, rows.argmax)

    def _run(self, number: int, sequence: Sequence[int]) -> Rows:
        """One sequence's rows."""
        key = SpoolId(next(self._numbers), len(sequence))
        # One token is the least that SGLang generates; the prompt's own pass gives it.
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        payload = {"rid": str(key), "input_ids": [int(t) for t in sequence], "sampling_params": sampling}
        try:
            answer: Any = self._server.post("/generate", payload)
            if (ran := answer["meta_info"]["prompt_tokens"]) != len(sequence):
                raise EngineError(f"SGLang ran {ran} of its {len(sequence)} tokens")
            rows = self._collect(key)
            if len(rows) != len(sequence):
                raise EngineError(f"{len(rows)} rows of states came for its {len(sequence)} tokens")
        except GoneError:
            raise
        except EngineError as error:
            raise SequenceError(number, str(error)) from None
        return rows

    def _collect(self, key: SpoolId) -> Rows:
        """The file of an answered request; it is written behind the answer."""
        states, failure = key.states_file(self._spool), key.failure_file(self._spool)
        deadline = time.monotonic() + _PATIENCE
        pause = 0.001
        while time.monotonic() < deadline:
            if states.exists():
                return Rows.take(states)
            if failure.exists():
                raise EngineError(f"no states came: {failure.read_text()}")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        if not self._server.alive:
            raise GoneError(self._server.obituary())
        raise EngineError(f"SGLang answered, and no states came within {_PATIENCE:.0f} s")


@contextmanager
def capture(model: Path, spec: CaptureSpec, words: Sequence[str]) -> Iterator[SGLangCapture]:
    """Start SGLang on ``model`` to capture ``spec``; see `capture_hooks.engines.contract.EngineProvider`."""
    check_environment()
    with tempfile.TemporaryDirectory(prefix="capture-hooks-spool-") as spool:
        environment = {SPEC: str(spec), SPOOL: spool, **ROOM}
        with running(command_line(model, words), environment) as server:
            check_reports(server)
            yield SGLangCapture(server, Path(spool))


def _context_of(model: Path) -> int | None:
    """Tokens the model was made to read, where its config says."""
    try:
        config = load_config(str(model))
    except ModelError:
        return None  # SGLang reads it too, and says what is wrong with it
    return context_length(config)


def command_line(model: Path, words: Sequence[str]) -> list[str]:
    """The user's flags between those they may change and those they may not.

    Raises:
        EngineError: they name another model.
    """
    if "model" in (flags := read_flags(words)):
        raise EngineError(f"--model {model} and {flags.text('model', '')}: name the model once, before --")
    ours = ["--model-path", str(model), "--skip-tokenizer-init"]
    if (context := _context_of(model)) is not None:
        ours += ["--context-length", str(context + _BEYOND)]
    # A cached prefix has no rows, a replayed graph runs no hooks, and nothing is decoded here.
    fixed = ["--disable-radix-cache", "--disable-cuda-graph", "--skip-server-warmup", "--log-level", "error"]
    return [*ours, *words, *fixed]
