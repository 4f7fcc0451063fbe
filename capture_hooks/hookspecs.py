"""The plugin contract: every hook a plugin may implement, and what the values it returns must have.

A plugin is a module named by an entry point in the group ``capture_hooks``; it decorates any of
these functions with `capture_hooks.hookimpl`.  Each hook *returns* a list of values, so that a
duplicate can be blamed on a distribution and a result can be checked once; none is ever called
per tensor.  Each returned value carries a ``name``, unique within its kind.

The protocols here state no more than the loader checks: which members a value of each kind has.  What
the members take and return is stated by the room that uses them, and this module imports no room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import pluggy

PROJECT: Final = "capture_hooks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Named(Protocol):
    """A value of any kind."""

    @property
    def name(self) -> str:
        """Letters, digits, ``.``, ``_`` and ``-``."""
        ...


class SomeAnatomy(Named, Protocol):
    """In full: `capture_hooks.capture.AnatomyProvider`."""

    match: Any
    describe: Any
    unwrap: Any


class SomeHead(Named, Protocol):
    """In full: `capture_hooks.heads.HeadProvider`."""

    config_type: Any
    schema: Any
    create: Any
    restore: Any


class SomeConvention(Named, Protocol):
    """In full: `capture_hooks.conventions.Convention`."""

    library: Any
    versions: Any
    families: Any
    key: Any
    source: Any
    limits: Any
    rank: Any
    read_on: Any
    order: Any
    count: Any
    primary: Any
    overrides: Any
    to_points: Any
    from_points: Any
    captured: Any
    default: Any


class SomeReader(Named, Protocol):
    """In full: `capture_hooks.conventions.Reader`."""

    library: Any
    versions: Any
    source: Any
    rank: Any
    read_on: Any
    read: Any


class SomeFormat(Named, Protocol):
    """In full: `capture_hooks.interop.dumps.DumpFormat`."""

    recognises: Any
    meaning: Any
    pickles: Any
    says_points: Any
    resumes: Any
    open: Any
    write: Any


class SomeEngine(Named, Protocol):
    """In full: `capture_hooks.engines.EngineProvider`."""

    capture: Any
    decode: Any
    serve: Any


class SomeCommand(Named, Protocol):
    """In full: `capture_hooks.cli.contract.Command`."""

    function: Any
    help: Any


@hookspec
def capture_hooks_anatomies() -> Sequence[SomeAnatomy]:  # type: ignore[empty-body]  # a spec has no body
    """How to find the decoder's parts in models of one library."""


@hookspec
def capture_hooks_heads() -> Sequence[SomeHead]:  # type: ignore[empty-body]  # as above
    """Draft heads that can be trained, saved, loaded and drafted with."""


@hookspec
def capture_hooks_conventions() -> Sequence[SomeConvention]:  # type: ignore[empty-body]  # as above
    """What one library's integer layer ids mean."""


@hookspec
def capture_hooks_readers() -> Sequence[SomeReader]:  # type: ignore[empty-body]  # as above
    """How an engine gets from a draft head's ``config.json`` to captured states."""


@hookspec
def capture_hooks_formats() -> Sequence[SomeFormat]:  # type: ignore[empty-body]  # as above
    """Formats of hidden-state dumps."""


@hookspec
def capture_hooks_engines() -> Sequence[SomeEngine]:  # type: ignore[empty-body]  # as above
    """Engines that can capture from, or decode with, a target model."""


@hookspec
def capture_hooks_commands() -> Sequence[SomeCommand]:  # type: ignore[empty-body]  # as above
    """Extra commands of the ``capture-hooks`` command line."""


#: Every kind of value and, beside ``name``, the members that one must have.
KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        kind: tuple(protocol.__annotations__)
        for kind, protocol in {
            "anatomies": SomeAnatomy,
            "heads": SomeHead,
            "conventions": SomeConvention,
            "readers": SomeReader,
            "formats": SomeFormat,
            "engines": SomeEngine,
            "commands": SomeCommand,
        }.items()
    }
)
