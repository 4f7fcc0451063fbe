"""What is installed, by name: the loader of the plugin contract.

`registry()` is the process's one registry, built on first use; `build_registry` makes one as a plain
value.  A plugin is the object named by an entry point of the group ``capture_hooks``.  Each is
loaded, registered and checked by itself, so one that is broken is reported and left out:

* one that cannot be imported, has a wrong signature or an unknown hook adds nothing;
* a hook that raises or returns something of the wrong shape loses what that hook would have added.

Which plugins are loaded is set by four environment variables; names are entry-point or distribution names:

* ``CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD=1``: load none but those in ``CAPTURE_HOOKS_PLUGINS``;
* ``CAPTURE_HOOKS_PLUGINS=a,b``: load only these;
* ``CAPTURE_HOOKS_DISABLE_PLUGINS=a,b``: leave these out;
* ``CAPTURE_HOOKS_STRICT_PLUGINS=1``: raise where a plugin would be reported as broken.

Nothing here imports torch; a plugin's own hooks may.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, final

from ._contributions import Contributions, MissingPluginError
from ._one_plugin import KINDS, BrokenPlugin, LoadedPlugin, Origin, hook_name
from .errors import PluginError

if TYPE_CHECKING:
    from .capture.anatomy import AnatomyProvider
    from .cli.contract import Command
    from .conventions.contract import Convention, Reader
    from .decoding.contract import EngineProvider
    from .heads.contract import HeadProvider
    from .store.formats import DumpFormat

__all__ = [
    "GROUP",
    "KINDS",
    "BrokenPlugin",
    "Contributions",
    "MissingPluginError",
    "PluginInfo",
    "Registry",
    "build_registry",
    "registry",
]

#: The entry-point group.
GROUP: Final = "capture_hooks"
_CORE: Final = "core"
#: What a plugin's own code may raise, all of it kept and shown; a user's interrupt goes through.
_ISOLATED: Final = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin that was loaded, and the names it adds, by kind (kinds it does not implement are absent)."""

    name: str
    distribution: str
    version: str
    adds: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Collected:
    """One kind, from every plugin."""

    values: Mapping[str, Any]
    owners: Mapping[str, LoadedPlugin]
    broken: tuple[BrokenPlugin, ...]


@final
class Registry:
    """What the loaded plugins add.  Each kind's hooks are called once, when that kind is first asked for.

    Every property may raise `PluginError`: two plugins add one name or, in strict mode, a hook is broken.
    """

    __slots__ = ("_kinds", "_loaded", "_strict", "_unloadable")

    def __init__(
        self, loaded: Iterable[LoadedPlugin], unloadable: Iterable[BrokenPlugin], strict: bool = False
    ) -> None:
        self._loaded = tuple(sorted(loaded, key=lambda plugin: plugin.origin.name))
        self._unloadable = tuple(sorted(unloadable, key=lambda plugin: plugin.name))
        self._strict = strict
        self._kinds: dict[str, _Collected] = {}

    @property
    def anatomies(self) -> Contributions[AnatomyProvider]:
        """How to find the decoder's parts, by provider name."""
        return self._contributions("anatomies")

    @property
    def heads(self) -> Contributions[HeadProvider]:
        """Draft heads, by name."""
        return self._contributions("heads")

    @property
    def conventions(self) -> Contributions[Convention]:
        """Meanings of integer layer ids, by name."""
        return self._contributions("conventions")

    @property
    def readers(self) -> Contributions[Reader]:
        """How engines read a head's ``config.json``, by name."""
        return self._contributions("readers")

    @property
    def formats(self) -> Contributions[DumpFormat]:
        """Formats of hidden-state dumps, by name."""
        return self._contributions("formats")

    @property
    def engines(self) -> Contributions[EngineProvider]:
        """Engines, by name."""
        return self._contributions("engines")

    @property
    def commands(self) -> Contributions[Command]:
        """Extra commands of the command line, by name."""
        return self._contributions("commands")

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin that was loaded, by name, with what it adds.  Calls every hook."""
        return tuple(
            PluginInfo(
                plugin.origin.name, plugin.origin.distribution, plugin.origin.version, self._added_by(plugin)
            )
            for plugin in self._loaded
        )

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Every plugin, or hook of one, that was left out, by name.  Calls every hook."""
        hooks = [broken for kind in KINDS for broken in self._collect(kind).broken]
        return tuple(sorted((*self._unloadable, *hooks), key=lambda broken: broken.name))

    def _contributions(self, kind: str) -> Contributions[Any]:
        collected = self._collect(kind)
        return Contributions(kind, collected.values, (*self._unloadable, *collected.broken))

    def _added_by(self, plugin: LoadedPlugin) -> Mapping[str, tuple[str, ...]]:
        adds = {}
        for kind in KINDS:
            owners = self._collect(kind).owners
            if names := tuple(sorted(name for name, owner in owners.items() if owner is plugin)):
                adds[kind] = names
        return MappingProxyType(adds)

    def _collect(self, kind: str) -> _Collected:
        if kind not in self._kinds:
            values: dict[str, Any] = {}
            owners: dict[str, LoadedPlugin] = {}
            broken: list[BrokenPlugin] = []
            for plugin in self._loaded:
                try:
                    added = plugin.values(kind)
                except _ISOLATED as error:
                    broken.append(_left_out(error, plugin.origin, self._strict, hook_name(kind)))
                    continue
                for name in added:
                    if name in owners:
                        raise _duplicate(f"{kind} named {name!r}", owners[name].origin, plugin.origin)
                    owners[name] = plugin
                values.update(added)
            self._kinds[kind] = _Collected(values, owners, tuple(broken))
        return self._kinds[kind]


def build_registry(
    entry_points: Iterable[metadata.EntryPoint] | None = None, environ: Mapping[str, str] | None = None
) -> Registry:
    """Load the core's own contributions and the plugins that the environment allows.

    Args:
        entry_points: what to load from; None for those installed under the group ``capture_hooks``.
        environ: the variables of the module's docstring; None for the process's own.

    Raises:
        PluginError: two plugins of one name, a malformed variable, or in strict mode any broken plugin.
    """
    from . import __version__, _core  # here, because conventions look themselves up in the registry

    environ = os.environ if environ is None else environ
    autoload = not _flag(environ, "CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD")
    strict = _flag(environ, "CAPTURE_HOOKS_STRICT_PLUGINS")
    wanted = _names(environ, "CAPTURE_HOOKS_PLUGINS")
    unwanted = _names(environ, "CAPTURE_HOOKS_DISABLE_PLUGINS")
    found = metadata.entry_points(group=GROUP) if entry_points is None else entry_points

    origins = {_CORE: Origin(_CORE, "capture-hooks", __version__)}
    loaded = [LoadedPlugin.register(_core, origins[_CORE])]
    broken = []
    seen: set[str] = set()
    for entry_point in sorted(found, key=lambda e: (e.name, e.value)):
        origin = Origin.of(entry_point)
        names = {_canonical(origin.name), _canonical(origin.distribution)}
        seen |= names
        if names & unwanted or not (names & wanted if wanted else autoload):
            continue
        if origin.name in origins:
            raise _duplicate(f"plugins named {origin.name!r}", origins[origin.name], origin)
        origins[origin.name] = origin
        try:
            loaded.append(LoadedPlugin.register(entry_point.load(), origin))
        except _ISOLATED as error:
            broken.append(_left_out(error, origin, strict))
    for name in wanted - seen:
        absent = PluginError(
            "named in CAPTURE_HOOKS_PLUGINS, but no installed plugin or distribution is called that"
        )
        broken.append(_left_out(absent, Origin(name, "not installed", "-"), strict))
    return Registry(loaded, broken, strict)


@functools.cache
def registry() -> Registry:
    """The process's registry, built once, on first use."""
    return build_registry()


def _left_out(error: BaseException, origin: Origin, strict: bool, hook: str | None = None) -> BrokenPlugin:
    broken = origin.broken(error, hook)
    if strict:
        raise PluginError(f"broken plugin (CAPTURE_HOOKS_STRICT_PLUGINS is set): {broken}") from error
    return broken


def _duplicate(what: str, first: Origin, second: Origin) -> PluginError:
    return PluginError(
        f"two {what}: one from {first.distribution} {first.version}, one from {second.distribution} "
        f"{second.version}; uninstall one, or name its distribution in CAPTURE_HOOKS_DISABLE_PLUGINS"
    )


def _canonical(name: str) -> str:
    """A name as packaging tools compare them: ``Capture_Hooks.X`` is ``capture-hooks-x``."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _names(environ: Mapping[str, str], variable: str) -> set[str]:
    return {_canonical(name) for name in environ.get(variable, "").split(",") if name.strip()}


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise PluginError(f"{variable} is {value!r}; set it to 1 or 0")
