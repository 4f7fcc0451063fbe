"""The house: imports between rooms point one way and in no circle, and what should be light is light.

Every import counts: at the top of a module, inside a function, and for type checkers alone.  Where the code
does not keep a rule yet, the exceptions are listed here.  The lists only shrink: an entry that no longer
occurs fails the test as a new violation does.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
#: From the top down: a room may import those after it.  Single modules of the package are rooms as well.
ROOMS = (
    "testing",
    "_core",
    "cli",
    "interop",
    "engines",
    "training",
    "decoding",
    "heads",
    "store",
    "target",
    "capture",
    "conventions",
    "spec",
    "plugins",
    "hookspecs",
    "_version",
    "settings",
    "foreign",
    "io",
    "errors",
)
#: Rooms that a plugin may not import: it is used by commands and by tests, and uses neither.
NOT_FOR_PLUGINS = {"testing", "cli", "_core"}

#: Imports that point up: importing module, imported module.
UPWARD: set[tuple[str, str]] = set()
#: Modules that import themselves by way of others.
CIRCLES: set[frozenset[str]] = set()
#: Modules below the commands that ask for what is installed, instead of being given it.
ASKING = {
    "capture_hooks.capture.unwrap",
    "capture_hooks.heads.checkpoint",
}
#: What binding a spec to a transformers model loads of our own, beyond `bind` itself and that anatomy.
BOUND_WITH = {"capture_hooks_sglang.anatomy"}  # to learn that the model is none of SGLang's

FILES = sorted((HERE / "capture_hooks").rglob("*.py")) + sorted(
    (HERE / "plugins").glob("*/capture_hooks_*/**/*.py")
)


def dotted(path: Path) -> str:
    """The name under which a file is imported."""
    parts = path.relative_to(HERE).with_suffix("").parts
    parts = parts[2:] if parts[0] == "plugins" else parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in FILES}


def named(module: str, path: Path) -> Iterator[str]:
    """What the import statements of a module name, wherever they stand: modules, or members of them."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in MODULES else base


@cache
def imported() -> Mapping[str, frozenset[str]]:
    """Our modules that each of our modules imports."""
    return {
        module: frozenset(named(module, path)) & MODULES.keys() - {module} for module, path in MODULES.items()
    }


def room(module: str) -> str:
    """A room of the core, ``""`` for the core's own ``__init__``, or a plugin's package."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "capture_hooks" else package


def may_import(module: str, other: str) -> bool:
    here, there = room(module), room(other)
    if here == there or here == "":
        return True
    if here in ROOMS:
        return there in ROOMS[ROOMS.index(here) + 1 :]
    return there == "" or (there in ROOMS and there not in NOT_FOR_PLUGINS)


def circles() -> set[frozenset[str]]:
    """The strongly connected components of more than one module (Tarjan's algorithm)."""
    found: set[frozenset[str]] = set()
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in imported()[module]:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            members = stack[stack.index(module) :]
            del stack[-len(members) :]
            if len(members) > 1:
                found.add(frozenset(members))

    for module in MODULES:
        if module not in number:
            visit(module)
    return found


def test_every_module_has_a_room() -> None:
    assert {room(module) for module in MODULES if module.startswith("capture_hooks.")} == set(ROOMS)


def test_imports_point_down() -> None:
    upward = {(m, other) for m, others in imported().items() for other in others if not may_import(m, other)}
    assert upward == UPWARD


def test_there_are_no_circles() -> None:
    assert circles() == CIRCLES


def test_who_asks_for_what_is_installed() -> None:
    """Commands do, and give it to those below."""
    asking = {module for module, others in imported().items() if "capture_hooks.plugins" in others}
    assert {m for m in asking if room(m) in ROOMS and room(m) not in ("cli", "testing")} == ASKING


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".spec",
        ".conventions",
        ".conventions.facts",
        ".plugins",
        ".hookspecs",
        ".testing.strategies",
        ".testing.pytest_plugin",
        ".cli",
    ],
)
def test_no_torch_until_it_is_needed(module: str) -> None:
    code = f"import sys, capture_hooks{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_binding_loads_capture_and_one_anatomy() -> None:
    """Of other plugins it loads the module of the entry point, to learn that they add no anatomy."""
    code = (
        "import sys, transformers; sizes = {'hidden_size': 8, 'num_attention_heads': 1, 'vocab_size': 8}; "
        "config = transformers.LlamaConfig(**sizes, intermediate_size=8, num_hidden_layers=3); "
        "model = transformers.LlamaForCausalLM(config); "
        "from capture_hooks import bind; bind(model, 'post.1, post.2'); "
        "print(*(name for name in sys.modules if name.startswith('capture_hooks')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    others = {
        name if room(name) not in ROOMS else f"capture_hooks.{room(name)}"
        for name in loaded.split()
        if room(name) not in ("", "_version", "errors", "hookspecs", "plugins", "_core", "spec", "capture")
        and room(name) != "capture_hooks_transformers"
        and name not in (room(name), f"{room(name)}.plugin")
    }
    assert others == BOUND_WITH
