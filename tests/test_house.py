"""The house of docs/index.md: imports between rooms point one way, and some rooms import no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parents[1] / "capture_hooks"
#: From the top down: a room may import those after it.
ROOMS = (
    "cli",
    "launch",
    "diagnosis",
    "training",
    "decoding",
    "heads",
    "store",
    "target",
    "capture",
    "conventions",
    "spec",
)
FILES = sorted(path for room in ROOMS for path in (CORE / room).rglob("*.py"))


def rooms_imported(path: Path) -> set[str]:
    """Rooms that ``path`` imports when it runs; imports for type checkers alone do not count."""
    package = ["capture_hooks", *path.relative_to(CORE).parts[:-1]]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            names = [*start, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                full = [*names, alias.name]
                if full[0] == "capture_hooks" and full[1] in ROOMS:
                    found.add(full[1])
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(CORE).parts[0]
    above = set(ROOMS[: ROOMS.index(room)])
    assert not rooms_imported(path) & above


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".spec",
        ".conventions",
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
