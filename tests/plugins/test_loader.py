"""The plugin loader, against real installed distributions (a package and its metadata on ``sys.path``)."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from textwrap import dedent

import pytest

from capture_hooks import CaptureHooksError, Point, hookspecs
from capture_hooks.errors import PluginError
from capture_hooks.plugins import GROUP, KINDS, Registry, build_registry, registry

Install = Callable[..., None]

FORMAT = """
    from capture_hooks import hookimpl

    class Format:
        name = "{name}"
        meaning = None
        pickles = says_points = resumes = False
        def recognises(self, directory):
            return False
        def open(self, directory):
            raise NotImplementedError
        def write(self, directory, rows, plan):
            raise NotImplementedError

    @hookimpl
    def capture_hooks_formats():
        return [Format()]
"""

OWN = set(build_registry(entry_points=()).formats)


def added(found: Registry) -> list[str]:
    """Names of the formats that plugins add to the core's."""
    return [name for name in found.formats if name not in OWN]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one plugin module on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(distribution: str, source: str, *, entry_point: str | None = None, version: str = "1.2") -> None:
        module = f"loader_test_{distribution.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(dedent(source))
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry_point or distribution} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)

    return add


def installed_here(tmp_path: Path) -> list[metadata.EntryPoint]:
    """Only what the test installed, so that this environment's own plugins play no part."""
    found = metadata.entry_points(group=GROUP)
    return [e for e in found if e.dist is not None and Path(str(e.dist.locate_file(""))) == tmp_path]


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Registry]:
    def make(**environ: str) -> Registry:
        return build_registry(
            installed_here(tmp_path), environ={f"CAPTURE_HOOKS_{k}": v for k, v in environ.items()}
        )

    return make


def test_a_plugin_adds_what_its_hooks_return(install: Install, build: Callable[..., Registry]) -> None:
    install("acme-shards", FORMAT.format(name="acme"), version="3.4")
    found = build()
    assert added(found) == ["acme"]
    assert found.formats["acme"].recognises(Path()) is False
    assert found.broken == ()
    core, acme = sorted(found.plugins, key=lambda plugin: plugin.distribution != "capture-hooks")
    assert (acme.name, acme.distribution, acme.version) == ("acme-shards", "acme-shards", "3.4")
    assert acme.adds == {"formats": ("acme",)}
    assert core.name == "core"


def test_the_core_adds_its_conventions_like_any_plugin(build: Callable[..., Registry]) -> None:
    found = build(DISABLE_PLUGIN_AUTOLOAD="1")
    (core,) = found.plugins
    assert (core.distribution, set(core.adds)) == ("capture-hooks", {"conventions", "readers", "formats"})
    assert found.conventions["vllm"].to_points([3], 12) == (Point.pre(3),)


BROKEN = {
    "import": ("import there_is_no_such_module", "ModuleNotFoundError", None),
    "syntax": ("def (", "SyntaxError", None),
    "exit": ("raise SystemExit('gone')", "SystemExit: gone", None),
    "signature": (
        "from capture_hooks import hookimpl\n@hookimpl\ndef capture_hooks_formats(model): return []",
        "PluginValidationError: .*capture_hooks_formats",
        None,
    ),
    "unknown-hook": (
        "from capture_hooks import hookimpl\n@hookimpl\ndef capture_hooks_colours(): return []",
        "PluginValidationError: .*unknown hook 'capture_hooks_colours'",
        None,
    ),
    "no-hook": ("x = 1", "implements no hook", None),
    "raises": (
        "from capture_hooks import hookimpl\n@hookimpl\ndef capture_hooks_heads(): return 1 / 0",
        "ZeroDivisionError: division by zero",
        "capture_hooks_heads",
    ),
    "none": (
        "from capture_hooks import hookimpl\n@hookimpl\ndef capture_hooks_heads(): pass",
        "returned None; return a list",
        "capture_hooks_heads",
    ),
    "not-a-list": (
        "from capture_hooks import hookimpl\n@hookimpl\ndef capture_hooks_engines(): return 'sglang'",
        "returned a str; return a list",
        "capture_hooks_engines",
    ),
    "not-a-format": (
        "from capture_hooks import hookimpl\n@hookimpl\ndef capture_hooks_formats(): return [3]",
        "returned a int, which is none of the formats: it has no name, recognises",
        "capture_hooks_formats",
    ),
    "a-class": (
        FORMAT.format(name="x").replace("[Format()]", "[Format]"),
        "returned the class Format; return an instance",
        "capture_hooks_formats",
    ),
    "wrapper": (
        "from capture_hooks import hookimpl\n@hookimpl(wrapper=True)\n"
        "def capture_hooks_formats():\n    yield\n    return []",
        "returned a generator; return a list",
        "capture_hooks_formats",
    ),
    "bad-name": (
        FORMAT.format(name="two words"),
        "whose name is 'two words'",
        "capture_hooks_formats",
    ),
    "twice": (
        FORMAT.format(name="x").replace("[Format()]", "[Format(), Format()]"),
        "returned two formats named 'x'",
        "capture_hooks_formats",
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_plugin_is_left_out_and_reported(
    case: str, install: Install, build: Callable[..., Registry]
) -> None:
    source, reason, hook = BROKEN[case]
    install("a-good-one", FORMAT.format(name="good"))
    install("broken-one", source, version="0.9")
    install("z-good-one", FORMAT.format(name="good2"))
    found = build()
    (broken,) = found.broken
    assert (broken.name, broken.distribution, broken.version) == ("broken-one", "broken-one", "0.9")
    assert broken.hook == hook
    assert "\n" not in broken.reason
    with pytest.raises(PluginError, match=reason):
        raise PluginError(broken.reason)
    assert broken.traceback.startswith("Traceback") or "Error" in broken.traceback
    assert added(found) == ["good", "good2"]
    with pytest.raises(PluginError, match=r"CAPTURE_HOOKS_STRICT_PLUGINS.*broken-one"):
        _ = build(STRICT_PLUGINS="1").broken


def test_a_broken_hook_costs_only_what_it_would_have_added(
    install: Install, build: Callable[..., Registry]
) -> None:
    install(
        "half",
        FORMAT.format(name="half")
        + "\n    @hookimpl\n    def capture_hooks_heads():\n        raise OSError('no GPU')\n",
    )
    found = build()
    assert added(found) == ["half"]
    assert [str(broken) for broken in found.broken] == [
        "half (half 1.2, in capture_hooks_heads): OSError: no GPU"
    ]
    assert next(plugin for plugin in found.plugins if plugin.name == "half").adds == {"formats": ("half",)}


def test_a_missing_name_shows_what_there_is_and_what_is_broken(
    install: Install, build: Callable[..., Registry]
) -> None:
    install("good", FORMAT.format(name="acme"))
    install("bad", "import there_is_no_such_module", version="0.9")
    with pytest.raises(PluginError) as caught:
        _ = build().formats["acne"]
    message = str(caught.value)
    assert "nothing named 'acne' among the installed formats (acme, " in message
    assert "did you mean 'acme'?" in message
    assert "bad (bad 0.9): ModuleNotFoundError: No module named 'there_is_no_such_module'" in message
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, CaptureHooksError)
    with pytest.raises(PluginError, match="among the installed heads: there are none"):
        _ = build().heads["eagle9"]


def test_the_mappings_are_read_only_mappings(install: Install, build: Callable[..., Registry]) -> None:
    install(
        "two",
        FORMAT.format(name="b").replace("[Format()]", "[Format(), A()]")
        + "\n    class A(Format): name = 'a'\n",
    )
    found = build()
    assert added(found) == ["a", "b"]
    formats = found.formats
    assert ("a" in formats, "c" in formats, formats.get("c")) == (True, False, None)
    with pytest.raises(TypeError):
        formats["c"] = formats["a"]  # type: ignore[index]  # that is the point


def test_two_plugins_may_not_add_one_name(install: Install, build: Callable[..., Registry]) -> None:
    install("first", FORMAT.format(name="acme"), version="1.0")
    install("second", FORMAT.format(name="acme"), version="2.0")
    found = build()
    with pytest.raises(
        PluginError, match=r"two formats named 'acme': one from first 1\.0, one from second 2\.0"
    ):
        _ = found.formats
    assert added(build(DISABLE_PLUGINS="second")) == ["acme"]
    assert found.engines.get("x") is None  # other kinds are not held up


def test_two_plugins_may_not_have_one_name(install: Install, build: Callable[..., Registry]) -> None:
    install("first", FORMAT.format(name="a"), entry_point="same")
    install("second", FORMAT.format(name="b"), entry_point="same")
    with pytest.raises(
        PluginError, match=r"two plugins named 'same': one from first 1\.2, one from second 1\.2"
    ):
        build()
    install("third", FORMAT.format(name="c"), entry_point="core")
    with pytest.raises(
        PluginError, match=r"two plugins named 'core': one from capture-hooks .*, one from third"
    ):
        build(DISABLE_PLUGINS="first")


def test_one_module_is_one_plugin(install: Install, build: Callable[..., Registry], tmp_path: Path) -> None:
    install("first", FORMAT.format(name="acme"))
    (tmp_path / "first-1.2.dist-info" / "entry_points.txt").write_text(
        f"[{GROUP}]\nfirst = loader_test_first\nsecond = loader_test_first\n"
    )
    found = build()
    assert added(found) == ["acme"]
    assert [str(broken) for broken in found.broken] == [
        "second (first 1.2): loader_test_first is also the plugin first (first 1.2)"
    ]


def test_a_convention_of_the_core_cannot_be_replaced(
    install: Install, build: Callable[..., Registry]
) -> None:
    install(
        "impostor",
        """
        from capture_hooks import hookimpl
        from capture_hooks.conventions import BUILTIN

        @hookimpl
        def capture_hooks_conventions():
            return [BUILTIN["vllm"]]
        """,
    )
    with pytest.raises(
        PluginError, match=r"two conventions named 'vllm': one from capture-hooks .*, one from impostor"
    ):
        _ = build().conventions


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["acme", "zeta"]),
        ({"PLUGINS": "acme-shards"}, ["acme"]),
        ({"PLUGINS": " ACME_Shards , "}, ["acme"]),
        ({"PLUGINS": "zeta-entry"}, ["zeta"]),
        ({"DISABLE_PLUGINS": "zeta-entry"}, ["acme"]),
        ({"DISABLE_PLUGINS": "zeta.dist,acme-shards"}, []),
        ({"DISABLE_PLUGINS": "never-installed"}, ["acme", "zeta"]),
        ({"PLUGINS": "acme-shards", "DISABLE_PLUGINS": "acme-shards"}, []),
        ({"DISABLE_PLUGIN_AUTOLOAD": "1"}, []),
        ({"DISABLE_PLUGIN_AUTOLOAD": "0"}, ["acme", "zeta"]),
        ({"DISABLE_PLUGIN_AUTOLOAD": "yes", "PLUGINS": "acme-shards"}, ["acme"]),
    ],
)
def test_environment_variables(
    environ: dict[str, str], expected: list[str], install: Install, build: Callable[..., Registry]
) -> None:
    install("acme-shards", FORMAT.format(name="acme"))
    install("zeta-dist", FORMAT.format(name="zeta"), entry_point="zeta-entry")
    found = build(**environ)
    assert added(found) == expected
    assert found.broken == ()


def test_a_plugin_that_is_left_out_is_not_even_imported(
    install: Install, build: Callable[..., Registry], capfd: pytest.CaptureFixture[str]
) -> None:
    install("loud", "print('imported')")
    build(DISABLE_PLUGINS="loud")
    assert capfd.readouterr().out == ""


def test_an_allow_list_that_names_what_is_not_there_is_reported(build: Callable[..., Registry]) -> None:
    found = build(PLUGINS="eagle-nine")
    assert "eagle-nine (not installed -): named in CAPTURE_HOOKS_PLUGINS" in str(found.broken[0])
    with pytest.raises(PluginError, match="eagle-nine"):
        build(PLUGINS="eagle-nine", STRICT_PLUGINS="true")


def test_a_malformed_variable_is_an_error(build: Callable[..., Registry]) -> None:
    with pytest.raises(PluginError, match=r"CAPTURE_HOOKS_STRICT_PLUGINS is 'maybe'; set it to 1 or 0"):
        build(STRICT_PLUGINS="maybe")


def test_hooks_are_called_once_and_only_when_their_kind_is_asked_for(
    install: Install, build: Callable[..., Registry], capfd: pytest.CaptureFixture[str]
) -> None:
    install("loud", FORMAT.format(name="x").replace("return [", "print('called'); return ["))
    found = build()
    _ = found.heads, found.conventions
    assert capfd.readouterr().out == ""
    _ = found.formats, found.formats, found.plugins, found.broken
    assert capfd.readouterr().out == "called\n"


def test_an_interrupt_is_not_taken_for_a_broken_plugin(
    install: Install, build: Callable[..., Registry]
) -> None:
    install("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        build()


def test_every_hook_has_a_kind_and_every_kind_its_contract() -> None:
    hooks = {name for name in vars(hookspecs) if name.startswith(f"{GROUP}_")}
    assert hooks == {f"{GROUP}_{kind}" for kind in KINDS}

    from capture_hooks.capture.anatomy import AnatomyProvider
    from capture_hooks.cli.contract import Command
    from capture_hooks.conventions import Convention, Reader
    from capture_hooks.engines import EngineProvider
    from capture_hooks.heads.contract import HeadProvider
    from capture_hooks.interop.dumps import DumpFormat

    contracts = {
        "anatomies": AnatomyProvider,
        "heads": HeadProvider,
        "conventions": Convention,
        "formats": DumpFormat,
        "engines": EngineProvider,
        "commands": Command,
        "readers": Reader,
    }
    assert contracts.keys() == KINDS.keys()
    for kind, contract in contracts.items():
        members = {
            m for base in contract.__mro__[:-1] for m in (*vars(base), *getattr(base, "__annotations__", ()))
        }
        public = {m for m in members if not m.startswith("_")}
        assert set(KINDS[kind]) | {"name"} <= public, kind


def test_the_process_has_one_registry() -> None:
    assert registry() is registry()


def test_the_fixture_of_the_pytest_plugin(capture_registry: Registry) -> None:
    assert "vllm" in capture_registry.conventions


@pytest.mark.parametrize(
    ("kind", "room"), [("conventions", "conventions"), ("readers", "conventions"), ("anatomies", "")]
)
def test_a_kind_loads_nothing_of_another(kind: str, room: str) -> None:
    code = (
        f"import sys; from capture_hooks.plugins import registry; registry().{kind}; "
        "print(*{name.split('.')[1] for name in sys.modules if name.startswith('capture_hooks.')})"
    )
    environ = {**os.environ, "CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environ, capture_output=True, text=True
    )
    loaded = {"_core", "_version", "errors", "hookspecs", "plugins", "spec"} | {room} - {""}
    assert set(done.stdout.split()) == loaded


def test_loading_and_listing_the_core_imports_no_torch() -> None:
    code = (
        "import sys; from capture_hooks.plugins import registry; r = registry(); r.plugins, r.broken; "
        "import capture_hooks.testing.pytest_plugin, capture_hooks.testing.strategies; "
        "assert 'torch' not in sys.modules"
    )
    environ = {**os.environ, "CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
