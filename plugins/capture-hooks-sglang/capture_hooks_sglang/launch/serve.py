"""``serve`` of the engine: the checks, then the command shown and run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from capture_hooks.engines.checks import check_port, check_target

from . import checks
from .command import compose, shown
from .installed import SGLANG
from .watch import watch


def serve(head: Path, model: Path, settings: Sequence[str], start_timeout: float) -> int:
    """Serve ``model`` with ``head``; see `capture_hooks.engines.contract.EngineProvider.serve`.

    Raises:
        EngineError, HeadError, ModelError, SpecError: what was asked cannot be served, or must not.
    """
    asked = checks.check_head(head, model, os.environ)
    command = compose(head, model, settings)
    assert asked.head is not None
    check_target(asked.head, model)
    warning = SGLANG.check_installed()
    checks.check_plugin_loads(os.environ)
    check_port(command.bind, command.port)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    print(shown(command, os.environ), flush=True)
    return watch(command, os.environ, start_timeout)
