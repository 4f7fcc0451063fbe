"""Finding, checking and naming what is installed: the loader of the pluggy contract.

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

import difflib
import functools
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

import pluggy

from . import hookspecs
from .errors import PluginError

if TYPE_CHECKING:
    from .capture.anatomy import AnatomyProvider
    from .cli.contract import Command
    from .conventions.contract import Convention
    from .decoding.contract import EngineProvider
    from .heads.contract import HeadProvider
    from .store.contract import DumpFormat

GROUP: Final = "capture_hooks"
#: Every kind of contribution and, beside ``name``, the members each value must have.  Written out so
#: that checking a value imports none of the contracts (most of those import torch).
KINDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "anatomies": ("match", "describe", "unwrap"),
        "heads": ("config_type", "create", "restore"),
        "conventions": (
            "library",
            "versions",
            "families",
            "key",
            "source",
            "limits",
            "to_points",
            "from_points",
        ),
        "formats": ("recognises",),
        "engines": (),
        "commands": ("function", "help"),
    }
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_T = TypeVar("_T")


class MissingPluginError(PluginError, KeyError):
    """Nothing installed has the name that was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message quoted


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
class PluginInfo:
    """A plugin that was loaded, and the names it adds, by kind (kinds it does not implement are absent)."""

    name: str
    distribution: str
    version: str
    adds: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One loaded plugin behind a manager of its own: no plugin can wrap or reorder another's hooks."""

    name: str
    distribution: str
    version: str
    manager: pluggy.PluginManager

    def broken(self, error: BaseException, hook: str | None = None) -> BrokenPlugin:
        return _broken(self.name, self.distribution, self.version, error, hook)


@final
class Contributions(Mapping[str, _T], Generic[_T]):
    """Read-only values by name, sorted; a missing name raises a `PluginError` that lists them."""

    __slots__ = ("_broken", "_kind", "_values")

    def __init__(
        self, kind: str, values: Mapping[str, _T], broken: Callable[[], Sequence[BrokenPlugin]]
    ) -> None:
        self._kind = kind
        self._values = dict(sorted(values.items()))
        self._broken = broken

    def __getitem__(self, name: str) -> _T:
        if name in self._values:
            return self._values[name]
        near = difflib.get_close_matches(str(name), self._values, n=1)
        lines = [
            f"no {self._kind} named {name!r} is installed"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + (
                f" (installed: {', '.join(self._values)})"
                if self._values
                else f" (no {self._kind} are installed)"
            )
        ]
        if broken := self._broken():
            lines.append("these plugins are broken, and one of them may provide it:")
            lines += [f"  {plugin}" for plugin in broken]
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
    """What the loaded plugins add.  Each kind's hooks are called once, when that kind is first asked for."""

    __slots__ = ("_failed", "_kinds", "_loaded", "_strict", "_unloadable")

    def __init__(self, loaded: Sequence[_Loaded], unloadable: Sequence[BrokenPlugin], strict: bool) -> None:
        self._loaded = tuple(loaded)
        self._unloadable = tuple(unloadable)
        self._strict = strict
        self._kinds: dict[str, dict[str, tuple[Any, _Loaded]]] = {}
        self._failed: dict[str, tuple[BrokenPlugin, ...]] = {}

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
    def formats(self) -> Contributions[DumpFormat]:
        """Other libraries' dump formats, by name."""
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
        by_kind = {kind: self._values(kind) for kind in KINDS}
        return tuple(
            PluginInfo(
                plugin.name,
                plugin.distribution,
                plugin.version,
                {
                    kind: names
                    for kind, values in by_kind.items()
                    if (
                        names := tuple(sorted(name for name, (_, owner) in values.items() if owner is plugin))
                    )
                },
            )
            for plugin in self._loaded
        )

    @property
    def broken(self) -> tuple[BrokenPlugin, ...]:
        """Every plugin, or hook of one, that was left out, by name.  Calls every hook."""
        return tuple(sorted((b for kind in KINDS for b in self._broken_for(kind, once=True)), key=str))

    def _contributions(self, kind: str) -> Contributions[Any]:
        values = {name: value for name, (value, _) in self._values(kind).items()}
        return Contributions(kind, values, lambda: self._broken_for(kind))

    def _broken_for(self, kind: str, once: bool = False) -> tuple[BrokenPlugin, ...]:
        self._values(kind)
        # `once`: the plugins that did not load at all belong to every kind, and are listed with the first.
        shared = () if once and kind != next(iter(KINDS)) else self._unloadable
        return shared + self._failed[kind]

    def _values(self, kind: str) -> dict[str, tuple[Any, _Loaded]]:
        if kind not in self._kinds:
            found: dict[str, tuple[Any, _Loaded]] = {}
            failed: list[BrokenPlugin] = []
            for plugin in self._loaded:
                hook = f"{GROUP}_{kind}"
                try:
                    values = _call(plugin, hook, kind)
                except (
                    Exception,
                    SystemExit,
                ) as error:  # isolation: whatever a plugin does is kept and shown
                    failed.append(_report(plugin.broken(error, hook), error, self._strict))
                    continue
                for name, value in values.items():
                    if name in found:
                        raise _duplicate(f"{kind} named {name!r}", found[name][1], plugin)
                    found[name] = (value, plugin)
            self._failed[kind] = tuple(failed)
            self._kinds[kind] = found
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
    environ = os.environ if environ is None else environ
    autoload = not _flag(environ, "CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD")
    strict = _flag(environ, "CAPTURE_HOOKS_STRICT_PLUGINS")
    wanted = _names(environ, "CAPTURE_HOOKS_PLUGINS")
    unwanted = set(_names(environ, "CAPTURE_HOOKS_DISABLE_PLUGINS"))
    found = metadata.entry_points(group=GROUP) if entry_points is None else entry_points

    core = _load_core()
    loaded, broken, missing = {core.name: core}, {}, dict.fromkeys(wanted)
    for entry_point in sorted(found, key=lambda e: (e.name, e.value)):
        distribution, version = _distribution(entry_point)
        names = {_canonical(entry_point.name), _canonical(distribution)}
        for name in names:
            missing.pop(name, None)
        if names & unwanted or ((wanted or not autoload) and not names & set(wanted)):
            continue
        taken = loaded.get(entry_point.name) or broken.get(entry_point.name)
        if taken is not None:
            raise _duplicate(f"plugin named {entry_point.name!r}", taken, distribution)
        try:
            manager = _register(entry_point.load(), entry_point.name)
        except (Exception, SystemExit) as error:  # isolation: whatever a plugin does is kept and shown
            failure = _broken(entry_point.name, distribution, version, error)
            broken[entry_point.name] = _report(failure, error, strict)
        else:
            loaded[entry_point.name] = _Loaded(entry_point.name, distribution, version, manager)
    for name in missing:
        error = PluginError(
            "CAPTURE_HOOKS_PLUGINS asks for it, but no installed plugin or distribution has that name"
        )
        broken[name] = _report(_broken(name, "not installed", "-", error), error, strict)
    return Registry(
        [loaded[name] for name in sorted(loaded)], [broken[name] for name in sorted(broken)], strict
    )


@functools.cache
def registry() -> Registry:
    """The process's registry, built once, on first use."""
    return build_registry()


def _load_core() -> _Loaded:
    from . import __version__
    from .conventions import builtin

    return _Loaded("core", "capture-hooks", __version__, _register(builtin, "core"))


def _register(plugin: object, name: str) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise PluginError("it implements no hook; decorate its functions with capture_hooks.hookimpl")
    return manager


def _call(plugin: _Loaded, hook: str, kind: str) -> dict[str, Any]:
    """The values one plugin's hook returns, by name, checked."""
    caller: pluggy.HookCaller = getattr(plugin.manager.hook, hook)
    if not caller.get_hookimpls():
        return {}
    results = caller()
    if not results:  # pluggy drops a None result
        raise PluginError("returned None; return a list, empty if there is nothing to add")
    values: dict[str, Any] = {}
    for result in results:
        if not isinstance(result, list | tuple):
            raise PluginError(f"returned {type(result).__name__}; return a list")
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
    absent = [m for m in ("name", *KINDS[kind]) if inspect.getattr_static(value, m, None) is None]
    if absent:
        raise PluginError(f"{what}, which is none of the {kind}: it has no {', '.join(absent)}")
    name: object = getattr(value, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PluginError(f"{what} whose name is {name!r}; a name is letters, digits, '.', '_' and '-'")
    return name


def _report(broken: BrokenPlugin, error: BaseException, strict: bool) -> BrokenPlugin:
    if strict:
        raise PluginError(f"broken plugin (CAPTURE_HOOKS_STRICT_PLUGINS is set): {broken}") from error
    return broken


def _broken(
    name: str, distribution: str, version: str, error: BaseException, hook: str | None = None
) -> BrokenPlugin:
    text = " ".join(str(error).split()) or "no message"
    reason = text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}"
    return BrokenPlugin(name, distribution, version, reason, "".join(traceback.format_exception(error)), hook)


def _duplicate(what: str, first: _Loaded | BrokenPlugin, second: _Loaded | str) -> PluginError:
    other = second if isinstance(second, str) else second.distribution
    return PluginError(
        f"two {what}: one from {first.distribution}, one from {other}; uninstall one, "
        "or leave its distribution out with CAPTURE_HOOKS_DISABLE_PLUGINS"
    )


def _distribution(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    return ("unknown", "-") if entry_point.dist is None else (entry_point.dist.name, entry_point.dist.version)


def _canonical(name: str) -> str:
    """A name as packaging tools compare them: ``Capture_Hooks.X`` is ``capture-hooks-x``."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _names(environ: Mapping[str, str], variable: str) -> tuple[str, ...]:
    return tuple(_canonical(name.strip()) for name in environ.get(variable, "").split(",") if name.strip())


def _flag(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise PluginError(f"{variable} is {value!r}; set it to 1 or 0")
