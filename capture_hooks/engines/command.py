"""An engine's command line: a user's flags, read and never rewritten; and a command that anyone can copy."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ..errors import EngineError

#: The name under which a table of spellings lists the flag that names a file of flags.
CONFIG: Final = "config"
#: Of each flag that is read, by the name used here, the spellings that the engine takes.
Spellings = Mapping[str, tuple[str, ...]]
#: A setting whose name contains one of these holds a secret: its value is never shown.
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_HIDDEN: Final = "***"


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


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server's command line, and where it will answer.

    Attributes:
        argv: the command.
        scheme: ``http`` or ``https``.
        host: that clients on this machine reach it by.
        bind: the address it listens on.
        port: the port.
        api_key: that it asks its clients for; empty for none.
    """

    argv: tuple[str, ...]
    scheme: str
    host: str
    bind: str
    port: int
    api_key: str

    @property
    def url(self) -> str:
        """Where clients on this machine reach it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def reached_by(bind: str) -> str:
    """The host by which this machine reaches a server that listens on ``bind``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(bind, bind)


def shown(
    argv: Sequence[str],
    environment: Mapping[str, str],
    prefixes: tuple[str, ...],
    secrets: Spellings,
) -> str:
    """One line for a shell; keys are left out.

    Args:
        argv: the command.
        environment: of it.
        prefixes: beginnings of the names of settings that change what it does.
        secrets: flags whose values are keys.
    """
    settings = [
        f"{name}={_HIDDEN if any(part in name for part in _SECRET) else shlex.quote(value)}"
        for name, value in sorted(environment.items())
        if name.startswith(prefixes)
    ]
    return " ".join([*settings, *(shlex.quote(word) for word in _without(argv, secrets))])


def _without(argv: Sequence[str], secrets: Spellings) -> list[str]:
    kept: list[str] = []
    secret = False  # the word before was a flag whose value is a key
    for word in argv:
        flag, equals, _ = word.partition("=")
        if secret:
            kept.append(_HIDDEN)
            secret = False
        elif named(flag, secrets) is not None:
            kept.append(f"{flag}={_HIDDEN}" if equals else word)
            secret = not equals
        else:
            kept.append(word)
    return kept


def without(words: Sequence[str], dropped: Callable[[str], bool]) -> list[str]:
    """A user's words without some flags and their values.

    Args:
        words: for an engine.
        dropped: told a flag, whether to leave it out.
    """
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("-") and not word.lstrip("-").isdecimal():
            dropping = dropped(word.partition("=")[0])
        if not dropping:
            kept.append(word)
    return kept
