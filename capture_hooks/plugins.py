"""What is installed, by name: the loader of the plugin contract.

`registry()` is the process's one registry, built on first use; `build_registry` makes one as a plain
value.  A plugin is the object named by an entry point of the group ``capture_hooks``.  One
`pluggy.PluginManager` holds all of them.  Each is registered and checked by itself, and its hooks are
called one at a time, so one that is broken is reported and left out:

* one that cannot be imported, has a wrong signature or an unknown hook adds nothing;
* a hook that raises or returns something of the wrong shape loses what that hook would have added.

Which plugins are loaded is set by four environment variables; names are entry-point or distribution names:

* ``CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD=1``: load none but those in ``CAPTURE_HOOKS_PLUGINS``;
* ``CAPTURE_HOOKS_PLUGINS=a,b``: load only these;
* ``CAPTURE_HOOKS_DISABLE_PLUGINS=a,b``: leave these out;
* ``CAPTURE_HOOKS_STRICT_PLUGINS=1``: raise where a plugin would be reported as broken.

This module imports no room of the project: what a value of a kind can do is the affair of the room that uses
it, which states the type (``heads: Mapping[str, HeadProvider] = registry().heads``).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, final

import pluggy

from . import hookspecs
from ._version import __version__
from .errors import PluginError
from .hookspecs import KINDS, PROJECT

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
#: The core's own plugin, which is loaded whatever the environment says.
_CORE: Final = metadata.EntryPoint("core", "capture_hooks._core", GROUP)
#: What a plugin's own code may raise, all of it kept and shown; a user's interrupt goes through.
_ISOLATED: Final = (Exception, SystemExit)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_T = TypeVar("_T")


class MissingPluginError(PluginError, KeyError):
    """No installed plugin adds a value of the name that was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message quoted


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A plugin, and the distribution that declares it.

    Attributes:
        name: entry-point name.
        distribution, version: the installed distribution.
        adds: the names it adds, by kind (kinds it does not implement are absent).
    """

    name: str
    distribution: str
    version: str
    adds: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


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


@final
class Contributions(Mapping[str, _T], Generic[_T]):
    """Read-only values by name, sorted; a missing name raises a `PluginError` that lists them."""

    __slots__ = ("_broken", "_kind", "_owners", "_values")

    def __init__(
        self,
        kind: str,
        values: Mapping[str, _T],
        owners: Mapping[str, PluginInfo],
        broken: Sequence[BrokenPlugin],
    ) -> None:
        self._kind = kind
        self._values = dict(sorted(values.items()))
        self._owners = owners
        self._broken = broken

    def __getitem__(self, name: str) -> _T:
        if name in self._values:
            return self._values[name]
        near = difflib.get_close_matches(str(name), self._values, n=1)
        lines = [
            f"nothing named {name!r} among the installed {self._kind}"
            + (f" ({', '.join(self._values)})" if self._values else ": there are none")
            + (f"; did you mean {near[0]!r}?" if near else "")
        ]
        if self._broken:
            lines.append("broken, and so left out:")
            lines += [f"  {plugin}" for plugin in self._broken]
        raise MissingPluginError("\n".join(lines))

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<{self._kind}: {', '.join(self._values) or 'none'}>"


@final
class Registry:
    """What the loaded plugins add.  Each kind's hooks are called once, when that kind is first asked for.

    Every property may raise `PluginError`: two plugins add one name or, in strict mode, a hook is broken.
    """

    __slots__ = ("_collected", "_manager", "_origins", "_strict", "_unloadable")

    def __init__(self, strict: bool = False) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._strict = strict
        #: By plugin name, those that are registered and those that could not be.
        self._origins: dict[str, PluginInfo] = {}
        self._unloadable: list[BrokenPlugin] = []
        self._collected: dict[str, Contributions[Any]] = {}

    @property
    def anatomies(self) -> Contributions[Any]:
        """How to find the decoder's parts (`capture.AnatomyProvider`), by provider name."""
        return self._collect("anatomies")

    @property
    def heads(self) -> Contributions[Any]:
        """Draft heads (`heads.HeadProvider`), by name."""
        return self._collect("heads")

    @property
    def conventions(self) -> Contributions[Any]:
        """Meanings of integer layer ids (`conventions.Convention`), by name."""
        return self._collect("conventions")

    @property
    def readers(self) -> Contributions[Any]:
        """How engines read a head's ``config.json`` (`conventions.Reader`), by name."""
        return self._collect("readers")

    @property
    def formats(self) -> Contributions[Any]:
        """Formats of hidden-state dumps (`interop.dumps.DumpFormat`), by name."""
        return self._collect("formats")

    @property
    def engines(self) -> Contributions[Any]:
        """Engines (`engines.EngineProvider`), by name."""
        return self._collect("engines")

    @property
    def commands(self) -> Contributions[Any]:
        """Extra commands of the command line (`cli.contract.Command`), by name."""
        return self._collect("commands")

    @property
    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin that was loaded, by name, with what it adds.  Calls every hook."""
        loaded = sorted(name for name, _ in self._manager.list_name_plugin())
        return tuple(self._info(self._origins[name]) for name in loaded)

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Every plugin, or hook of one, that was left out, by name.  Calls every hook."""
        hooks = [broken for kind in KINDS for broken in self._collect(kind)._broken if broken.hook]
        return tuple(sorted((*self._unloadable, *hooks), key=lambda broken: broken.name))

    def _load(self, entry_point: metadata.EntryPoint, origin: PluginInfo) -> None:
        """Import and register one plugin; report it where that fails.

        Raises:
            PluginError: another plugin has its name or, in strict mode, it is broken.
        """
        if origin.name in self._origins:
            raise _duplicate(f"plugins named {origin.name!r}", self._origins[origin.name], origin)
        self._origins[origin.name] = origin
        try:
            plugin = entry_point.load()
            if (other := self._manager.get_name(plugin)) is not None:
                raise PluginError(f"{entry_point.value} is also the plugin {self._origins[other]}")
            self._manager.register(plugin, origin.name)
            self._manager.check_pending()  # those before passed, so this is about the new one
            if not self._manager.get_hookcallers(plugin):
                raise PluginError("it implements no hook; decorate its functions with capture_hooks.hookimpl")
        except _ISOLATED as error:
            if self._manager.has_plugin(origin.name):
                self._manager.unregister(name=origin.name)
            self._unloadable.append(self._leave_out(origin, error))

    def _collect(self, kind: str) -> Contributions[Any]:
        """Call one hook of every plugin that implements it, in the order of their names."""
        if kind in self._collected:
            return self._collected[kind]
        hook: pluggy.HookCaller = getattr(self._manager.hook, f"{PROJECT}_{kind}")
        values: dict[str, Any] = {}
        owners: dict[str, PluginInfo] = {}
        broken = list(self._unloadable)
        for implementation in sorted(hook.get_hookimpls(), key=lambda one: one.plugin_name):
            origin = self._origins[implementation.plugin_name]
            try:
                added = _checked(implementation.function(), kind)
            except _ISOLATED as error:
                broken.append(self._leave_out(origin, error, hook.name))
                continue
            for name, value in added.items():
                if name in owners:
                    raise _duplicate(f"{kind} named {name!r}", owners[name], origin)
                owners[name] = origin
                values[name] = value
        self._collected[kind] = Contributions(kind, values, owners, broken)
        return self._collected[kind]

    def _info(self, origin: PluginInfo) -> PluginInfo:
        """The plugin with what it adds."""
        added = {kind: self._collect(kind) for kind in KINDS}
        names = {
            kind: tuple(name for name in found if found._owners[name] is origin)
            for kind, found in added.items()
        }
        return replace(origin, adds=MappingProxyType({kind: mine for kind, mine in names.items() if mine}))

    def _leave_out(self, origin: PluginInfo, error: BaseException, hook: str | None = None) -> BrokenPlugin:
        text = " ".join(str(error).split()) or "no message"
        reason = text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"
        lines = "".join(traceback.format_exception(error))
        broken = BrokenPlugin(origin.name, origin.distribution, origin.version, reason, lines, hook)
        if self._strict:
            raise PluginError(f"broken plugin (CAPTURE_HOOKS_STRICT_PLUGINS is set): {broken}") from error
        return broken


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
    environ = os.environ if environ is None else environ
    autoload = not _flag(environ, "CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD")
    wanted = _names(environ, "CAPTURE_HOOKS_PLUGINS")
    unwanted = _names(environ, "CAPTURE_HOOKS_DISABLE_PLUGINS")
    found = metadata.entry_points(group=GROUP) if entry_points is None else entry_points

    built = Registry(_flag(environ, "CAPTURE_HOOKS_STRICT_PLUGINS"))
    built._load(_CORE, PluginInfo(_CORE.name, "capture-hooks", __version__))
    seen: set[str] = set()
    for entry_point in sorted(found, key=lambda e: (e.name, e.value)):
        origin = _declared(entry_point)
        names = {_canonical(origin.name), _canonical(origin.distribution)}
        seen |= names
        if not names & unwanted and (names & wanted if wanted else autoload):
            built._load(entry_point, origin)
    for name in sorted(wanted - seen):
        absent = PluginError(
            "named in CAPTURE_HOOKS_PLUGINS, but no installed plugin or distribution is called that"
        )
        built._unloadable.append(built._leave_out(PluginInfo(name, "not installed", "-"), absent))
    return built


@functools.cache
def registry() -> Registry:
    """The process's registry, built once, on first use."""
    return build_registry()


def _declared(entry_point: metadata.EntryPoint) -> PluginInfo:
    """The plugin that it names; one made by hand belongs to no distribution."""
    if entry_point.dist is None:
        return PluginInfo(entry_point.name, "no distribution", "-")
    return PluginInfo(entry_point.name, entry_point.dist.name, entry_point.dist.version)


def _checked(result: object, kind: str) -> dict[str, Any]:
    """What a hook returned, by name.

    Raises:
        PluginError: it is no list of values of this kind.
    """
    if result is None:
        raise PluginError("returned None; return a list, empty if there is nothing to add")
    if not isinstance(result, list | tuple):
        raise PluginError(f"returned a {type(result).__name__}; return a list")
    values: dict[str, Any] = {}
    for value in result:
        name = _checked_name(value, kind)
        if name in values:
            raise PluginError(f"returned two {kind} named {name!r}")
        values[name] = value
    return values


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


def _duplicate(what: str, first: PluginInfo, second: PluginInfo) -> PluginError:
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
