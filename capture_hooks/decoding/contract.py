"""The contract of an engine: something that serves a target model with a draft head."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class EngineProvider(Protocol):
    """An engine contributed by ``capture_hooks_engines``."""

    @property
    def name(self) -> str: ...
