"""What this distribution adds to capture-hooks: the anatomy of SGLang's models, and SGLang as an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import capture_hooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capture_hooks.capture.anatomy import AnatomyProvider
    from capture_hooks.engines import EngineProvider


@capture_hooks.hookimpl
def capture_hooks_anatomies() -> Sequence[AnatomyProvider]:
    """The anatomy of every causal language model of SGLang, inside SGLang's own process."""
    from .anatomy import SGLangAnatomy

    return [SGLangAnatomy()]


@capture_hooks.hookimpl
def capture_hooks_engines() -> Sequence[EngineProvider]:
    """SGLang, started by us: to capture, to decode, to serve."""
    from .driver import SGLangDriver

    return [SGLangDriver()]
