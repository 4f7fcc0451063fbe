"""Flags of SGLang's server as a user gave them: read for what `serve` must know, never rewritten."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capture_hooks.errors import EngineError

#: Spellings of the flags that are read, by the name used here (``sglang/srt/arg_groups/fields``, 0.5.23).
_SPELLINGS: Final = MappingProxyType(
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


@dataclass(frozen=True, slots=True)
class Flags:
    """What was given, by the names of `_SPELLINGS`; the value of a flag without one is empty."""

    given: Mapping[str, str]

    @classmethod
    def read(cls, words: Sequence[str]) -> Flags:
        """Read a command line, and the file that its ``--config`` names.

        As SGLang does, a later flag wins over an earlier one and the command line over the file
        (``sglang/srt/utils/server_args_config_parser.py``, 0.5.23), and a flag may be cut short.

        Raises:
            EngineError: a config file that cannot be read.
        """
        line = dict(_pairs(words))
        if "config" in line:
            line = {**_from_file(Path(line["config"])), **line}
        return cls(MappingProxyType(line))

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def text(self, name: str, default: str) -> str:
        """The value of a flag."""
        return self.given.get(name, default)

    def number(self, name: str, default: int) -> int:
        """The value of a flag that takes a whole number of at least 1.

        Raises:
            EngineError: it is something else.
        """
        value = self.given.get(name, str(default))
        if not value.isdecimal() or int(value) < 1:
            raise EngineError(f"{_SPELLINGS[name][0]} is {value!r}; it takes a whole number of at least 1")
        return int(value)


def spelling(name: str) -> str:
    """The flag itself, as SGLang writes it."""
    return _SPELLINGS[name][0]


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for word, following in itertools.pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        name = named(flag)
        if name is not None:
            found.append((name, value if equals else "" if following.startswith("--") else following))
    return found


def named(flag: str) -> str | None:
    """The name a flag is read under; argparse takes the beginning of one too."""
    if not flag.startswith("--") or len(flag) < 4:
        return None
    exact = [name for name, spellings in _SPELLINGS.items() if flag in spellings]
    begun = [name for name, spellings in _SPELLINGS.items() if any(s.startswith(flag) for s in spellings)]
    return (exact or begun)[0] if len(exact or begun) == 1 else None


def _from_file(path: Path) -> dict[str, str]:
    # A dependency of transformers', and so of SGLang's.
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        read: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict):
        raise EngineError(f"--config {path} holds {type(read).__name__}; SGLang takes flags by name")
    words = [(named("--" + str(key).replace("_", "-")), value) for key, value in read.items()]
    return {name: "" if value is True else str(value) for name, value in words if name and value is not False}
