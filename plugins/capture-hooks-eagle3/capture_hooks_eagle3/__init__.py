"""The EAGLE-3 / EAGLE-3.1 draft head."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import Eagle3Config
    from .head import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Head"]


def __getattr__(name: str) -> object:
    # These import torch, and the entry point's module inside this package must not.
    if name == "Eagle3Config":
        from .config import Eagle3Config

        return Eagle3Config
    if name == "Eagle3Head":
        from .head import Eagle3Head

        return Eagle3Head
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
