"""Declarative hidden-state capture for draft heads: the spec travels with the head."""

from typing import TYPE_CHECKING

from ._version import __version__
from .errors import CaptureHooksError
from .hookspecs import hookimpl
from .spec import CaptureSpec, Point

if TYPE_CHECKING:
    from .capture import bind

__all__ = ["CaptureHooksError", "CaptureSpec", "Point", "__version__", "bind", "hookimpl"]


def __getattr__(name: str) -> object:
    # `bind` pulls in torch; specs and conventions must import without it.
    if name == "bind":
        from .capture import bind

        return bind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
