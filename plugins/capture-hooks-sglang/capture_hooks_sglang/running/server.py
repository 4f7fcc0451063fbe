"""One server of SGLang's for as long as a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from capture_hooks.engines.server import Server
from capture_hooks.engines.server import running as running_server
from capture_hooks.errors import EngineError

from ..launch import checks
from ..launch.flags import read_flags, spelling
from ..launch.installed import SGLANG

#: Flags for a server that others ask.
_ELSEWHERE: Final = ("certificate", "api key", "admin api key", "nodes", "grpc", "encoder", "host", "port")


@contextmanager
def running(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[Server]:
    """Start a server on a free port of this machine; leaving the context stops it.

    Args:
        words: of SGLang's command line; where it listens is added.
        environment: to set for it, beside this process's own.

    Raises:
        EngineError: it does not start; with the reason that a rank reported, else the end of its output.
    """
    flags = read_flags(words)
    if refused := [spelling(flag) for flag in _ELSEWHERE if flag in flags]:
        raise EngineError(
            f"{', '.join(refused)}: this server is asked by plain HTTP on this machine alone; leave it out"
        )
    with running_server("SGLang", "sglang.launch_server", words, environment, _settings) as server:
        yield server


def _settings(server: Server) -> dict[str, Any]:
    """SGLang's settings as they were resolved."""
    told: dict[str, Any] = server.get("/server_info")
    return told


def check_environment() -> None:
    """What can be seen before a server is started: SGLang is there, and will load the plugin.

    Raises:
        EngineError: it is not, or will not.
    """
    checks.check_plugin_loads(os.environ)
    warning = SGLANG.check_installed()
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)


def check_reports(server: Server) -> None:
    """Every rank has the plugin loaded and is content: silence is not success.

    Raises:
        EngineError: naming the ranks that did not report.
    """
    replicas, ranks = int(server.info.get("dp_size", 1)), int(server.info.get("tp_size", 1))
    wanted = {(replica, rank) for replica in range(replicas) for rank in range(ranks)}
    silent = sorted(wanted - {(report.replica, report.rank) for report in server.reports})
    if silent:
        named = ", ".join(f"replica {replica} rank {rank}" for replica, rank in silent)
        raise EngineError(
            f"SGLang runs without the plugin in {named}: its log says why it was not loaded "
            "(SGLANG_PLUGINS names the plugins that are)"
        )
