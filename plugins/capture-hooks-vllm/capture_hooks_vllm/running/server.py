"""One server of vLLM's for as long as a command runs."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capture_hooks.engines.server import Server
from capture_hooks.engines.server import running as running_server
from capture_hooks.errors import EngineError, ModelError
from capture_hooks.target import context_length, load_config

from ..launch import checks
from ..launch.command import MODULE, SETTINGS
from ..launch.flags import read_flags, spelling
from ..launch.installed import VLLM

#: Flags for a server that others ask, and those that are chosen here.
_ELSEWHERE: Final = (
    "host",
    "port",
    "socket",
    "api key",
    "certificate",
    "headless",
    "grpc",
    "nodes",
    "config",
)
#: Of the environment, where it does not choose.
_SETTINGS: Final = MappingProxyType(
    {
        **SETTINGS,
        "VLLM_NO_USAGE_STATS": "1",
        # On a CPU: whole cores are not ours alone, and the cache need not hold more than is under way.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
    }
)
#: Longest directory for temporary files that leaves room for a socket's name: 107 characters in all.
_LONGEST: Final = 55
#: How a traceback ends, in an error that one of vLLM's processes logs or by itself; pydantic's goes on.
_RAISED: Final = re.compile(
    r"^(?:\(\w+ pid=\d+\) ERROR [^\]]*\] )?(?:[\w.]+\.)?(\w+(?:Error|Exception): .+(?:\n  .+)?)$",
    re.MULTILINE,
)


@contextmanager
def running(
    model: Path, words: Sequence[str], fixed: Sequence[str], environment: Mapping[str, str]
) -> Iterator[Server]:
    """Start a server on a free port of this machine; leaving the context stops it.

    Args:
        model: the target.
        words: the user's, of vLLM's command line.
        fixed: flags that they may not change; where it listens is added.
        environment: to set for it, beside this process's own.

    Raises:
        EngineError: it does not start; with the reason that a rank reported, else what it raised.
    """
    check_words(model, words)
    line = ["--model", str(model), *defaults(model), *words, "--tokens-only", *fixed]
    line += ["--skip-tokenizer-init", "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    settings = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    # What it leaves behind, sockets and rendezvous files of its processes, is removed with the folder.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST else "/tmp"
    with tempfile.TemporaryDirectory(prefix="ch-", dir=base) as temporary:
        settings["TMPDIR"] = temporary
        with running_server("vLLM", MODULE, line, {**settings, **environment}, _told, _cause) as server:
            yield server


def check_words(model: Path, words: Sequence[str]) -> None:
    """The user's words leave to us what is ours.

    Raises:
        EngineError: they name another model, or a server that others ask.
    """
    flags = read_flags(words)
    if "model" in flags:
        raise EngineError(f"--model {model} and {flags.text('model', '')}: name the model once, before --")
    if refused := [spelling(flag) for flag in _ELSEWHERE if flag in flags]:
        raise EngineError(
            f"{', '.join(refused)}: this server is asked by plain HTTP on this machine alone; leave it out, "
            "and give its flags themselves"
        )


def defaults(model: Path) -> list[str]:
    """Flags before the user's, which win.

    A checkpoint in float32 stays so: vLLM's own choice rounds it to 16 bits, and a dump names the dtype.
    """
    import torch

    chosen = []
    try:
        config = load_config(str(model))
    except ModelError:
        config = None  # vLLM reads it too, and says what is wrong with it
    if getattr(config, "dtype", None) == torch.float32:
        chosen += ["--dtype", "float32"]
    if not torch.cuda.is_available():
        chosen += ["--enforce-eager"]  # compiling takes minutes on a CPU
    return chosen


def context_of(model: Path, beyond: int) -> tuple[list[str], dict[str, str]]:
    """The flag and the setting that give a prompt the model's whole context, and ``beyond`` places more."""
    try:
        config = load_config(str(model))
    except ModelError:
        return [], {}
    context = context_length(config)
    if context is None:
        return [], {}
    return ["--max-model-len", str(context + beyond)], {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


def generate(server: Server, tokens: Sequence[int], count: int, **options: Any) -> Any:
    """The server's answer to token ids, greedily.

    Raises:
        EngineError: it refused them, or is gone; with its reason.
    """
    sampling = {"temperature": 0, "max_tokens": count, "detokenize": False, **options}
    payload = {"token_ids": [int(token) for token in tokens], "sampling_params": sampling}
    return server.post("/inference/v1/generate", payload)


def check_environment() -> None:
    """What can be seen before a server is started: vLLM is there, and will load the plugin.

    Raises:
        EngineError: it is not, or will not.
    """
    warning = VLLM.check_installed()
    checks.check_plugin_loads(os.environ)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def _told(server: Server) -> dict[str, Any]:
    """How vLLM resolved its settings, once it is ready and every rank has reported.

    Raises:
        EngineError: it is ready, and a rank did not.
    """
    server.get("/health")
    reports = server.reports
    ranks = reports[0].ranks if reports else None
    if not reports or ranks is None or len(reports) < ranks:
        raise EngineError(
            f"vLLM runs without the plugin in {(ranks or 1) - len(reports)} of its {ranks or 1} workers: its "
            "log says why it was not loaded (VLLM_PLUGINS names the plugins that are)"
        )
    return dict(reports[0].settings)


def _cause(log: str) -> str | None:
    """The first exception that one of its processes logged; later ones only say that it failed."""
    found = _RAISED.search(log)
    return " ".join(found[1].split()) if found else None
