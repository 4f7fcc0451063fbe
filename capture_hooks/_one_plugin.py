"""One plugin by itself: registered, its hooks called, what they return checked.  Imports no torch."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import Any, Final

import pluggy

from . import hookspecs
from .errors import PluginError

#: Every kind of contribution and, beside ``name``, the members each value must have.  Written out so
#: that checking a value imports none of the contracts (most of those import torch).
KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "anatomies": ("match", "describe", "unwrap"),
        "heads": ("config_type", "create", "restore"),
        "conventions": (
            *("library", "versions", "families", "key", "source", "limits", "rank", "read_on", "order"),
            *("count", "primary", "overrides", "to_points", "from_points", "captured", "default"),
        ),
        "readers": ("library", "versions", "source", "rank", "read_on", "read"),
        "formats": ("recognises", "meaning", "pickles", "says_points", "resumes", "open", "write"),
        "engines": ("capture", "decode", "serve"),
        "commands": ("function", "help"),
    }
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin, or one hook of it, that was left out.

    Attributes:
        name: entry-point name.
        distribution: the installed distribution that declares it.
        version: that distribution's version.
        reason: one line.
        traceback: the full text, for its author.
        hook: the hook that failed; None when the plugin could not be loaded at all.
    """

    name: str
    distribution: str
    version: str
    reason: str
    traceback: str
    hook: str | None = None

    def __str__(self) -> str:
        where = f", in {self.hook}" if self.hook else ""
        return f"{self.name} ({self.distribution} {self.version}{where}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a plugin comes from."""

    name: str
    distribution: str
    version: str

    @classmethod
    def of(cls, entry_point: metadata.EntryPoint) -> Origin:
        """An entry point made by hand belongs to no distribution."""
        if entry_point.dist is None:
            return cls(entry_point.name, "no distribution", "-")
        return cls(entry_point.name, entry_point.dist.name, entry_point.dist.version)

    def broken(self, error: BaseException, hook: str | None = None) -> BrokenPlugin:
        """The report of ``error``."""
        text = " ".join(str(error).split()) or "no message"
        reason = text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"
        lines = "".join(traceback.format_exception(error))
        return BrokenPlugin(self.name, self.distribution, self.version, reason, lines, hook)


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A registered plugin, behind a manager of its own: none can wrap or reorder another's hooks."""

    origin: Origin
    manager: pluggy.PluginManager

    @classmethod
    def register(cls, plugin: object, origin: Origin) -> LoadedPlugin:
        """Register a plugin's module or object.

        Raises:
            PluginError: it implements no hook at all.
            pluggy.PluginValidationError: a hook is unknown or its signature is wrong.
        """
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        manager.register(plugin, origin.name)
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise PluginError("it implements no hook; decorate its functions with capture_hooks.hookimpl")
        return cls(origin, manager)

    def values(self, kind: str) -> dict[str, Any]:
        """What its hook for ``kind`` returns, by name; empty when it does not implement that hook.

        Raises:
            PluginError: the hook returned something of the wrong shape.
        """
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook_name(kind))
        if not caller.get_hookimpls():
            return {}
        results = caller()
        if not results:  # pluggy drops a None result
            raise PluginError("returned None; return a list, empty if there is nothing to add")
        values: dict[str, Any] = {}
        for result in results:
            if not isinstance(result, list | tuple):
                raise PluginError(f"returned a {type(result).__name__}; return a list")
            for value in result:
                name = _checked_name(value, kind)
                if name in values:
                    raise PluginError(f"returned two {kind} named {name!r}")
                values[name] = value
        return values


def hook_name(kind: str) -> str:
    """The hook that contributes ``kind``."""
    return f"{hookspecs.PROJECT}_{kind}"


def _checked_name(value: object, kind: str) -> str:
    if isinstance(value, type):
        raise PluginError(f"returned the class {value.__qualname__}; return an instance of it")
    what = f"returned a {type(value).__qualname__}"
    # Statically: a member may be a property that imports torch.
    missing = object()
    absent = [m for m in ("name", *KINDS[kind]) if inspect.getattr_static(value, m, missing) is missing]
    if absent:
        raise PluginError(f"{what}, which is none of the {kind}: it has no {', '.join(absent)}")
    name: object = getattr(value, "name")  # noqa: B009  # its static type has none
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(f"{what} whose name is {name!r}; a name is letters, digits, '.', '_' and '-'")
    return name
