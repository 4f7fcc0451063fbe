"""What this distribution adds to capture-hooks: vLLM as an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import capture_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capture_hooks.engines import EngineProvider


@capture_hooks.hookimpl
def capture_hooks_engines() -> Sequence[EngineProvider]:
    """vLLM, started by us: to capture, to decode, to serve."""
    from .driver import VllmDriver

    return [VllmDriver()]
