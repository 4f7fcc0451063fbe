"""What the core contributes itself: a plugin like any other, except that it is always there.

Each hook imports what it returns, so that asking for one kind loads nothing of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from .hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .conventions import Convention, Reader
    from .interop.dumps import DumpFormat

#: Names of `interop.dumps.FORMATS`.
_FORMATS: Final = (
    *("capture-hooks", "speculators", "speculators-v1", "speculators-v0"),
    *("specforge", "specforge-gz", "modelopt", "vllm"),
)


@hookimpl
def capture_hooks_conventions() -> Sequence[Convention]:
    """What each library's ids mean."""
    from .conventions.lookup import rows

    return rows()


@hookimpl
def capture_hooks_readers() -> Sequence[Reader]:
    """How engines read a head's ``config.json``."""
    from .conventions.readers import builtin_readers

    return builtin_readers()


@hookimpl
def capture_hooks_formats() -> Sequence[DumpFormat]:
    """The project's own dump and those of vLLM, speculators, SpecForge and ModelOpt."""
    return [cast("DumpFormat", _Format(name)) for name in _FORMATS]


def _forwarded(member: str) -> property:
    def get(self: _Format) -> Any:
        from .interop.dumps import FORMATS

        return getattr(FORMATS[self.name], member)

    return property(get)


class _Format:
    """One of the core's formats, imported when it is used: they need torch, and their names do not."""

    def __init__(self, name: str) -> None:
        self.name = name

    meaning = _forwarded("meaning")
    pickles = _forwarded("pickles")
    says_points = _forwarded("says_points")
    resumes = _forwarded("resumes")
    recognises = _forwarded("recognises")
    open = _forwarded("open")
    write = _forwarded("write")
