"""vLLM as an engine: each of its jobs in a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capture_hooks.decoding.contract import GeneratingEngine, Sampling
    from capture_hooks.engines.contract import CaptureEngine, DecodingEngine
    from capture_hooks.spec import CaptureSpec


class VllmEngine:
    """Contributed by ``capture_hooks_engines``; vLLM is imported only by what it starts."""

    name = "vllm"

    def capture(
        self, model: Path, spec: CaptureSpec, settings: Sequence[str]
    ) -> AbstractContextManager[CaptureEngine]:
        """See `capture_hooks.engines.contract.EngineProvider.capture`."""
        from .running.capture import capture

        return capture(model, spec, settings)

    def decode(
        self, model: Path, head: Path | None, settings: Sequence[str]
    ) -> AbstractContextManager[DecodingEngine]:
        """See `capture_hooks.engines.contract.EngineProvider.decode`."""
        from .running.decode import decode

        return decode(model, head, settings)

    def generate(
        self, model: Path, sampling: Sampling, settings: Sequence[str]
    ) -> AbstractContextManager[GeneratingEngine]:
        """See `capture_hooks.engines.contract.EngineProvider.generate`."""
        from .running.generation import generation

        return generation(model, sampling, settings)

    def serve(self, head: Path, model: Path, settings: Sequence[str], start_timeout: float) -> int:
        """See `capture_hooks.engines.contract.EngineProvider.serve`."""
        from .launch.serve import serve

        return serve(head, model, settings, start_timeout)
