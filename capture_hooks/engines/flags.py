"""Flags of an engine as a user gave them: read for what must be known before it starts, never rewritten."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..errors import EngineError

#: The name under which a table of spellings lists the flag that names a file of flags.
CONFIG: Final = "config"
#: Of each flag that is read, by the name used here, the spellings that the engine takes.
Spellings = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Flags:
    """What was given, by the names of ``spellings``; the value of a flag without one is empty."""

    given: Mapping[str, str]
    spellings: Spellings

    @classmethod
    def read(cls, words: Sequence[str], spellings: Spellings) -> Flags:
        """Read a command line, and the file that its config flag names.

        As argparse has it, a later flag wins over an earlier one and a flag may be cut short; the command
        line wins over the file.

        Raises:
            EngineError: a config file that cannot be read.
        """
        line = dict(_pairs(words, spellings))
        if CONFIG in line:
            line = {**_from_file(Path(line[CONFIG]), spellings), **line}
        return cls(MappingProxyType(line), spellings)

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
            raise EngineError(
                f"{self.spellings[name][0]} is {value!r}; it takes a whole number of at least 1"
            )
        return int(value)


def named(flag: str, spellings: Spellings) -> str | None:
    """The name a flag is read under; argparse takes the beginning of one too."""
    exact = [name for name, known in spellings.items() if flag in known]
    if exact or not flag.startswith("--") or len(flag) < 4:
        return exact[0] if exact else None
    flag = flag.replace("_", "-")  # as some engines' parsers do
    begun = [name for name, known in spellings.items() if any(s.startswith(flag) for s in known)]
    whole = [name for name in begun if flag in spellings[name]] or begun
    return whole[0] if len(whole) == 1 else None


def _pairs(words: Sequence[str], spellings: Spellings) -> list[tuple[str, str]]:
    found = []
    for word, following in itertools.pairwise([*words, "--"]):
        flag, equals, value = word.partition("=")
        name = named(flag, spellings)
        if name is not None:
            found.append((name, value if equals else "" if following.startswith("--") else following))
    return found


def _from_file(path: Path, spellings: Spellings) -> dict[str, str]:
    # A dependency of transformers', and so of every engine's.
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        read: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise EngineError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict):
        raise EngineError(f"--config {path} holds {type(read).__name__}; it takes flags by name")
    words = [(named("--" + str(key).replace("_", "-"), spellings), value) for key, value in read.items()]
    return {name: "" if value is True else str(value) for name, value in words if name and value is not False}
