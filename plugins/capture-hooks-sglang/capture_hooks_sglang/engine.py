"""SGLang as an engine: each of its jobs in a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class SGLangEngine:
    """Contributed by ``capture_hooks_engines``; imports SGLang only in what it starts."""

    name = "sglang"

    def serve(self, head: Path, model: Path, settings: Sequence[str], start_timeout: float) -> int:
        """See `capture_hooks.decoding.contract.EngineProvider.serve`."""
        from .launch.serve import serve

        return serve(head, model, settings, start_timeout)
