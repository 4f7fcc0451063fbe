"""Entry point: contributes the ``eagle3`` head.

Loaded by every command line, so it imports no torch; the provider does, when heads are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capture_hooks import hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capture_hooks.heads.contract import HeadProvider


@hookimpl
def capture_hooks_heads() -> Sequence[HeadProvider]:
    """The EAGLE-3 / 3.1 head."""
    from .provider import Eagle3Provider

    return [Eagle3Provider()]
