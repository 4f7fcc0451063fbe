"""Flags of vLLM's server that are read."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from capture_hooks.engines.flags import Flags, Spellings

#: By the name used here (``vllm/engine/arg_utils.py``, ``vllm/entrypoints/launchers/cli_args.py``, 0.32.0).
#: Its parser takes underscores for dashes and a file of flags, behind which the command line comes.
SPELLINGS: Final[Spellings] = MappingProxyType(
    {
        "model": ("--model",),
        "speculation": ("--speculative-config", "-sc"),
        "method": ("--spec-method",),
        "draft": ("--spec-model",),
        "steps": ("--spec-tokens",),
        "connector": ("--kv-transfer-config",),
        "tensor ranks": ("--tensor-parallel-size", "-tp"),
        "pipeline ranks": ("--pipeline-parallel-size", "-pp"),
        "replicas": ("--data-parallel-size", "-dp"),
        "nodes": ("--nnodes", "-n"),
        "host": ("--host",),
        "port": ("--port",),
        "socket": ("--uds",),
        "api key": ("--api-key",),
        "certificate": ("--ssl-certfile",),
        "config": ("--config",),
        "headless": ("--headless",),
        "grpc": ("--grpc",),
        "dtype": ("--dtype",),
        "eager": ("--enforce-eager",),
        "no eager": ("--no-enforce-eager",),
    }
)
#: Those whose values are keys.
SECRETS: Final[Spellings] = MappingProxyType({"api key": SPELLINGS["api key"]})


def read_flags(words: Sequence[str]) -> Flags:
    """A command line, and the file that its ``--config`` names.

    Parts of a JSON flag (``--speculative-config.model DIR``) count as the flag.

    Raises:
        EngineError: a config file that cannot be read.
    """
    whole = [word.partition(".")[0] if word.startswith("--") and _dotted(word) else word for word in words]
    return Flags.read(whole, SPELLINGS)


def _dotted(word: str) -> bool:
    flag = word.partition("=")[0]
    return "." in flag


def spelling(name: str) -> str:
    """The flag itself, as vLLM writes it."""
    return SPELLINGS[name][0]
