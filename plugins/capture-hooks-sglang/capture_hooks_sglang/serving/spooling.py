"""A spool's place in SGLang's processes; see `host` for the rest."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from capture_hooks.engines.reports import directory_of

from .asked import SPOOL, Asked
from .limits import check_spooling
from .spool import Spool

#: By id of the target's model, which lives as long as the process.
_SPOOLS: dict[int, Spool] = {}


def configure_spool(original: Callable[[Any], None], runner: Any, asked: Asked) -> None:
    """Bind the spec to the target; nothing is captured yet.

    Raises:
        EngineError: a server that cannot leave states in a spool, or no such directory.
        SpecError, BindError: the spec does not fit the target.
    """
    from sglang.srt.runtime_context import get_parallel

    check_spooling(runner, asked)
    original(runner)
    directory, parallel = directory_of(os.environ, SPOOL), get_parallel()
    assert directory is not None
    _SPOOLS[id(runner.model)] = Spool(
        runner.model, asked.spec, directory, ranks=parallel.tp_group.world_size, rank=parallel.tp_rank
    )


def open_spool(model: Any) -> dict[str, Any] | None:
    """Capture from now on, behind the server's warm-up; what to report, or None where none is asked for."""
    spool = _SPOOLS.get(id(model))
    if spool is None:
        return None
    spool.attach()
    return {
        "source": SPOOL,
        "points": [str(point) for point in spool.spec.inputs],
        "boundaries": spool.boundaries,
        "mechanism": "hooks",
        "reason": "whole prompts are left in a spool",
        "verdict": "unverified",
        "message": "a dump has no witness",
    }


def forget_aborted(result: None, scheduler: Any, request: Any) -> None:
    """Drop what a spool holds of aborted requests (``AbortReq`` names a prefix of their ids)."""
    for spool in _SPOOLS.values():
        spool.forget("" if request.abort_all else request.rid)
