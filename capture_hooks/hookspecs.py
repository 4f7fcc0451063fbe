"""The plugin contract: every hook a plugin may implement.

A plugin is a module named by an entry point in the group ``capture_hooks``; it decorates any of
these functions with `capture_hooks.hookimpl`.  Each hook *returns* a list of values, so that a
duplicate can be blamed on a distribution and a result can be checked once; none is ever called
per tensor.  Each returned value carries a ``name``, unique within its kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .capture.anatomy import AnatomyProvider
    from .cli.contract import Command
    from .conventions.contract import Convention, Reader
    from .decoding.contract import EngineProvider
    from .heads.contract import HeadProvider
    from .store.formats import DumpFormat

PROJECT: Final = "capture_hooks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def capture_hooks_anatomies() -> Sequence[AnatomyProvider]:  # type: ignore[empty-body]  # a spec has no body
    """How to find the decoder's parts in models of one library."""


@hookspec
def capture_hooks_heads() -> Sequence[HeadProvider]:  # type: ignore[empty-body]
    """Draft heads that can be trained, saved, loaded and drafted with."""


@hookspec
def capture_hooks_conventions() -> Sequence[Convention]:  # type: ignore[empty-body]
    """What one library's integer layer ids mean."""


@hookspec
def capture_hooks_readers() -> Sequence[Reader]:  # type: ignore[empty-body]
    """How an engine gets from a draft head's ``config.json`` to captured states."""


@hookspec
def capture_hooks_formats() -> Sequence[DumpFormat]:  # type: ignore[empty-body]
    """Formats of hidden-state dumps."""


@hookspec
def capture_hooks_engines() -> Sequence[EngineProvider]:  # type: ignore[empty-body]
    """Engines that can capture from, or decode with, a target model."""


@hookspec
def capture_hooks_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Extra commands of the ``capture-hooks`` command line."""
