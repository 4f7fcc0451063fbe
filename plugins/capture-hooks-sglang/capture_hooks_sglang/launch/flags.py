"""Flags of SGLang's server that are read."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from capture_hooks.engines import flags
from capture_hooks.engines.flags import Flags, Spellings

#: By the name used here (``sglang/srt/arg_groups/fields``, 0.5.23; what a file of flags says comes second,
#: ``sglang/srt/utils/server_args_config_parser.py``).
SPELLINGS: Final[Spellings] = MappingProxyType(
    {
        "model": ("--model-path", "--model"),
        "draft": ("--speculative-draft-model-path", "--speculative-draft-model"),
        "algorithm": ("--speculative-algorithm",),
        "steps": ("--speculative-num-steps",),
        "topk": ("--speculative-eagle-topk",),
        "draft tokens": ("--speculative-num-draft-tokens",),
        "host": ("--host",),
        "port": ("--port",),
        "api key": ("--api-key",),
        "admin api key": ("--admin-api-key",),
        "certificate password": ("--ssl-keyfile-password",),
        "certificate": ("--ssl-certfile",),
        "nodes": ("--nnodes",),
        "config": ("--config",),
        "grpc": ("--smg-grpc-mode", "--grpc-mode"),
        "encoder": ("--encoder-only",),
    }
)
#: Those whose values are keys.
SECRETS: Final[Spellings] = MappingProxyType(
    {name: SPELLINGS[name] for name in ("api key", "admin api key", "certificate password")}
)


def read_flags(words: Sequence[str]) -> Flags:
    """A command line, and the file that its ``--config`` names.

    Raises:
        EngineError: a config file that cannot be read.
    """
    return Flags.read(words, SPELLINGS)


def named(flag: str) -> str | None:
    """The name a flag is read under."""
    return flags.named(flag, SPELLINGS)


def spelling(name: str) -> str:
    """The flag itself, as SGLang writes it."""
    return SPELLINGS[name][0]
