"""An engine's server as a command line that anyone can copy and run without us."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from .flags import Spellings, named

#: Parts of names whose values are nobody's business.
_SECRET: Final = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_HIDDEN: Final = "***"


@dataclass(frozen=True, slots=True)
class Command:
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
