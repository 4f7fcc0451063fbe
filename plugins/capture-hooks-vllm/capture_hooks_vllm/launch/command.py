"""The command that starts vLLM's server with a draft head; whoever copies it needs nothing of ours."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capture_hooks.engines.command import Command, reached_by
from capture_hooks.engines.command import shown as shown_in_a_shell
from capture_hooks.engines.flags import Flags
from capture_hooks.errors import EngineError

from ..activate import HEAD
from .flags import SECRETS, read_flags, spelling

#: The server: ``vllm serve`` needs a distribution named vllm, which the CPU builds are not.
MODULE: Final = "vllm.entrypoints.openai.api_server"
#: Of the environment, where it does not choose: the model runner that was verified.
SETTINGS: Final = MappingProxyType({"VLLM_USE_V2_MODEL_RUNNER": "0"})
#: Settings of the environment that change what vLLM or the plugin does, shown with the command.
_SHOWN: Final = ("VLLM_", "CAPTURE_HOOKS_", "CUDA_VISIBLE_DEVICES")
#: Drafts in a chain, unless the user's flags choose.
STEPS: Final = 3


def compose(head: Path, model: Path, words: Sequence[str]) -> Command:
    """The command for ``model`` with ``head``.

    Args:
        head: the draft head's directory.
        model: a model directory, or a name that vLLM resolves.
        words: the user's, for vLLM.

    Raises:
        EngineError: the user's flags name another model or another way to draft, ask for a server whose life
            cannot be followed from here, or hold no number where one belongs.
    """
    flags = read_flags(words)
    _check_kind(flags)
    bind = flags.text("host", "127.0.0.1")
    ours = [] if "host" in flags else ["--host", bind]
    kept, drafting = drafting_of(head, words)
    return Command(
        argv=(sys.executable, "-m", MODULE, *named_model(model, flags), *ours, *kept, *drafting),
        scheme="https" if "certificate" in flags else "http",
        host=reached_by(bind),
        bind=bind,
        port=flags.number("port", 8000),
        api_key=flags.text("api key", ""),
    )


def named_model(model: Path, flags: Flags) -> list[str]:
    """The flag for the target, unless it is given.

    Raises:
        EngineError: another one is given.
    """
    other = flags.text("model", str(model))
    if Path(other).resolve() != model.resolve():
        raise EngineError(f"{model} and {spelling('model')} {other} are two; give one of them")
    return [] if "model" in flags else ["--model", str(model)]


def drafting_of(head: Path, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The user's words without those about drafting, and the flag that says all of it.

    vLLM takes the whole of drafting as one JSON flag, and a second one replaces the first.

    Raises:
        EngineError: they draft by another method or with another head, or in parts.
    """
    flags = read_flags(words)
    if shorthand := [spelling(name) for name in ("method", "draft") if name in flags]:
        raise EngineError(f"{', '.join(shorthand)}: the method is eagle3, the head {head}; leave it out")
    asked: dict[str, Any] = {"num_speculative_tokens": flags.number("steps", STEPS)}
    if "speculation" in flags:
        asked |= _json(flags.text("speculation", ""))
    for name, value in (("method", "eagle3"), ("model", str(head))):
        if str(asked.get(name, value)) != value:
            raise EngineError(f"{spelling('speculation')} names the {name} {asked[name]!r}, not {value!r}")
        asked[name] = value
    return without(words, ("speculation", "steps")), [spelling("speculation"), json.dumps(asked)]


def without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """The user's words without some flags and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("-") and not word.lstrip("-").isdecimal():
            flag = read_flags([word.partition("=")[0]])
            dropping = any(name in flag for name in names)
        if not dropping:
            kept.append(word)
    return kept


def settings_of(environment: Mapping[str, str], head: Path) -> dict[str, str]:
    """The environment of a server that drafts with ``head``."""
    return {**SETTINGS, **environment, HEAD: str(head)}


def shown(command: Command, environment: Mapping[str, str]) -> str:
    """One line for a shell, with the settings of ``environment`` that matter; keys are left out."""
    return shown_in_a_shell(command.argv, environment, _SHOWN, SECRETS)


def plain(head: Path, model: Path) -> str:
    """How to serve a head without us."""
    drafting = {"method": "eagle3", "model": str(head), "num_speculative_tokens": STEPS}
    words = ("--model", str(model), spelling("speculation"), json.dumps(drafting))
    return shlex.join(("python", "-m", MODULE, *words))


def _json(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise EngineError(
            f"{spelling('speculation')} is {text!r}; give it as one JSON object "
            f"({spelling('speculation')} '{{\"num_speculative_tokens\": 3}}'), not in parts"
        )
    return read


def _check_kind(flags: Flags) -> None:
    if flags.number("nodes", 1) > 1:
        raise EngineError(
            f"{spelling('nodes')} {flags.text('nodes', '')}: ranks on other machines cannot report to this "
            "one; run vLLM on each yourself: with CAPTURE_HOOKS_HEAD the witness is shown there all the same"
        )
    if "config" in flags:
        raise EngineError(
            f"{spelling('config')} FILE may hold flags that must be known here: give the flags themselves"
        )
    if refused := [spelling(name) for name in ("grpc", "headless", "socket") if name in flags]:
        raise EngineError(f"{', '.join(refused)}: serve follows a server over HTTP; leave it out")
