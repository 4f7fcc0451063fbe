"""What the core contributes itself, through the hooks that any plugin uses.  Listing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from .conventions.builtin import capture_hooks_conventions, capture_hooks_readers
from .hookspecs import hookimpl

if TYPE_CHECKING:
    from .store.formats import DumpFormat

__all__ = ["capture_hooks_conventions", "capture_hooks_formats", "capture_hooks_readers"]

#: Names of `store.formats.builtin.FORMATS`.
_FORMATS: Final = (
    *("capture-hooks", "speculators", "speculators-v1", "speculators-v0"),
    *("specforge", "specforge-gz", "modelopt", "vllm"),
)


@hookimpl
def capture_hooks_formats() -> Sequence[DumpFormat]:
    """The project's own dump and those of vLLM, speculators, SpecForge and ModelOpt."""
    return [cast("DumpFormat", _Format(name)) for name in _FORMATS]


def _forwarded(member: str) -> property:
    def get(self: _Format) -> Any:
        from .store.formats.builtin import FORMATS

        return getattr(FORMATS[self.name], member)

    return property(get)


class _Format:
    """One of the core's formats, imported when it is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    meaning = _forwarded("meaning")
    pickles = _forwarded("pickles")
    says_points = _forwarded("says_points")
    resumes = _forwarded("resumes")
    recognises = _forwarded("recognises")
    open = _forwarded("open")
    write = _forwarded("write")
