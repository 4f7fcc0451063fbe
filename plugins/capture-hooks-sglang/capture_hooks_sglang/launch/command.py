"""The command that starts SGLang's server with a draft head; whoever copies it needs nothing of ours."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from capture_hooks.engines.command import Command, reached_by
from capture_hooks.engines.command import shown as shown_in_a_shell
from capture_hooks.engines.flags import Flags
from capture_hooks.errors import EngineError

from .flags import SECRETS, read_flags, spelling

#: Settings of the environment that change what SGLang or the plugin does, shown with the command.
_SHOWN: Final = ("SGLANG_", "SGL_", "CAPTURE_HOOKS_", "CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE")
#: SGLang's own choice for most families (``arg_groups/speculative_hook.py``, 0.5.23): a chain of 3 drafts.
_STEPS: Final = 3
_TREE: Final = 8


def compose(head: Path, model: Path, settings: Sequence[str]) -> Command:
    """The command for ``model`` with ``head``; flags of the user's win over ours.

    Args:
        head: the draft head's directory.
        model: a model directory, or a name that SGLang resolves.
        settings: the user's words for SGLang.

    Raises:
        EngineError: the user's flags name another model or head, ask for a server whose life cannot be
            followed from here, or hold no number where one belongs.
    """
    flags = read_flags(settings)
    for name, path in (("model", model), ("draft", head)):
        other = flags.text(name, str(path))
        if not _same(Path(other), path):
            raise EngineError(f"{path} and {spelling(name)} {other} are two; give one of them")
    _check_kind(flags)
    steps, topk = flags.number("steps", _STEPS), flags.number("topk", 1)
    # With one branch the drafts are a chain behind the token that the target gave; else SGLang's usual tree,
    # as far as so many steps can fill it.
    tokens = steps + 1 if topk == 1 else min(_TREE, 1 + topk + (steps - 1) * topk * topk)
    ours = {
        "model": str(model),
        "algorithm": "EAGLE3",
        "draft": str(head),
        "steps": str(steps),
        "topk": str(topk),
        "draft tokens": str(tokens),
    }
    added = [word for name, value in ours.items() if name not in flags for word in (spelling(name), value)]
    bind = flags.text("host", "127.0.0.1")
    return Command(
        argv=(sys.executable, "-m", "sglang.launch_server", *added, *settings),
        scheme="https" if "certificate" in flags else "http",
        host=reached_by(bind),
        bind=bind,
        port=flags.number("port", 30000),
        api_key=flags.text("api key", ""),
    )


def shown(command: Command, environment: Mapping[str, str]) -> str:
    """One line for a shell, with the settings of ``environment`` that matter; keys are left out."""
    return shown_in_a_shell(command.argv, environment, _SHOWN, SECRETS)


def plain(head: Path, model: Path) -> str:
    """How to serve a head without us."""
    draft = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head))
    return shlex.join(("python", "-m", "sglang.launch_server", "--model-path", str(model), *draft))


def _check_kind(flags: Flags) -> None:
    if flags.number("nodes", 1) > 1:
        raise EngineError(
            f"{spelling('nodes')} {flags.text('nodes', '')}: ranks on other machines cannot report to this "
            "one; run SGLang on each yourself: the plugin shows the witness there all the same, and "
            "CAPTURE_HOOKS_HANDSHAKE names a directory for its reports"
        )
    for name, what in (("grpc", "a gRPC server"), ("encoder", "an encoder")):
        if name in flags:
            raise EngineError(f"{spelling(name)} makes it {what}; serve follows a server over HTTP")


def _same(left: Path, right: Path) -> bool:
    return left == right or left.resolve() == right.resolve()
