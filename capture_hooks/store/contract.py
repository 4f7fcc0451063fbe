"""The contract of another library's hidden-state dump format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class DumpFormat(Protocol):
    """A format contributed by ``capture_hooks_formats``."""

    @property
    def name(self) -> str: ...

    def recognises(self, directory: Path) -> bool:
        """Whether ``directory`` is of this format, judged without loading any pickle."""
        ...
