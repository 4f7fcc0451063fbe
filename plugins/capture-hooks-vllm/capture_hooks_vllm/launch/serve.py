"""``serve`` of the engine: the checks, then the command shown and run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from capture_hooks.engines.checks import check_port, check_target
from capture_hooks.engines.reports import Report
from capture_hooks.engines.watch import Get, Watched, watch

from . import checks
from .command import compose, settings_of, shown
from .installed import VLLM


def serve(head: Path, model: Path, settings: Sequence[str], start_timeout: float) -> int:
    """Serve ``model`` with ``head``; see `capture_hooks.engines.contract.EngineProvider.serve`.

    Raises:
        EngineError, HeadError, ModelError: what was asked cannot be served, or must not.
    """
    described = checks.check_head(head, model, os.environ)
    command = compose(head, model, settings)
    check_target(described, model)
    warning = VLLM.check_installed()
    checks.check_plugin_loads(os.environ)
    check_port(command.bind, command.port)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    environment = settings_of(os.environ, head)
    print(shown(command, environment), flush=True)
    silence = "vLLM logs above which plugins it loaded, and why not"
    return watch(Watched("vLLM", "workers", silence, _expected), command, environment, start_timeout)


def _expected(get: Get, reports: Sequence[Report]) -> set[tuple[int, int]] | None:
    """Which ranks it runs, as the first that reported says; it is ready when it says so."""
    if get("/health")[0] != 200:
        return None
    if not reports or reports[0].ranks is None:
        return {(0, 0)}
    replicas = 1 + max(report.replica for report in reports)
    each = -(-reports[0].ranks // replicas)
    return {(replica, rank) for replica in range(replicas) for rank in range(each)}
