"""An engine that is installed: there at all, of a version that was tested, or fit by what it defines.

Read from its source with `ast`: importing it takes seconds, and its processes run elsewhere anyway.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..errors import EngineError


@dataclass(frozen=True, slots=True)
class Feature:
    """Something of an engine's that a plugin wraps, calls or sets.

    Attributes:
        file: below the package.
        name: qualified, within that file.
        arguments: what a function is called with, and all it may need; None for what is no function, or
            one whose parameters are passed through.
    """

    file: str
    name: str
    arguments: tuple[str, ...] | None = None

    def lacking(self, package: Path) -> str | None:
        """Why it is not there as needed, as a clause; None where it is."""
        path = package / self.file
        try:
            node = _find(ast.parse(path.read_text(encoding="utf-8")), self.name.split("."))
        except (OSError, SyntaxError):
            return f"{self.file} is not there"
        if node is None:
            return f"{self.file} defines no {self.name}"
        if self.arguments is None:
            return None
        if not isinstance(node, ast.FunctionDef):
            return f"{self.name} of {self.file} is no function"
        parameters, required = _parameters(node)
        if unknown := [name for name in self.arguments if name not in parameters]:
            return f"{self.name} of {self.file} takes no {', '.join(unknown)}"
        if needed := [name for name in required if name not in self.arguments]:
            return f"{self.name} of {self.file} needs {', '.join(needed)}"
        return None


@dataclass(frozen=True, slots=True)
class Needed:
    """An engine as a plugin needs it.

    Attributes:
        name: the engine's.
        package: its Python package.
        distributions: names under which it may be installed.
        tested: first and last version that the plugin was tested with.
        features: what the plugin wraps, calls or sets.
        plugin: the plugin's distribution.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    tested: tuple[str, str]
    features: Sequence[Feature]
    plugin: str

    def check_installed(self) -> str | None:
        """Look at the engine of this environment; a warning, or None.

        Raises:
            EngineError: there is none, or one outside the tested versions that lacks what the plugin needs.
        """
        found = importlib.util.find_spec(self.package)
        if found is None or found.origin is None:
            raise EngineError(
                f"{self.name} is not installed for {sys.executable}; run this in the environment that has it "
                f"(capture-hooks and {self.plugin} are installed beside it)"
            )
        return self.judge(self.version() or "of unknown version", Path(found.origin).parent)

    def version(self) -> str | None:
        """The installed version, where a distribution tells."""
        for name in self.distributions:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def judge(self, version: str, package: Path) -> str | None:
        """A warning about this version, or None where it was tested.

        Raises:
            EngineError: it was not, and lacks what the plugin needs.
        """
        if self.is_tested(version):
            return None
        lacking = [why for feature in self.features if (why := feature.lacking(package)) is not None]
        first, last = self.tested
        outside = f"{self.name} {version} is outside the versions that were tested ({first} to {last})"
        if lacking:
            raise EngineError(
                f"{outside}, and lacks what the plugin needs: {'; '.join(lacking)}; install one of those "
                f"versions, or another {self.plugin}"
            )
        return f"{outside}; it defines what the plugin needs, and the witness is what decides"

    def is_tested(self, version: str) -> bool:
        """Whether a version lies in the tested range (``.postN`` counts as its release)."""
        release = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
        if release is None or re.search(r"(a|b|rc|dev)\d*", version[release.end() :]):
            return False
        low, high = (tuple(map(int, bound.split("."))) for bound in self.tested)
        return low <= tuple(map(int, release.groups())) <= high


def _find(node: ast.AST, names: list[str]) -> ast.AST | None:
    """The definition of a dotted name in a module or class body, or the first value of an instance's."""
    for child in getattr(node, "body", ()):
        if names[0] in _defined(child):
            return child if len(names) == 1 else _find(child, names[1:])
    initializer = _find(node, ["__init__"]) if names[0] != "__init__" else None
    if len(names) == 1 and isinstance(initializer, ast.FunctionDef):
        return next((line for line in initializer.body if f"self.{names[0]}" in _assigned(line)), None)
    return None


def _defined(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return _assigned(node)


def _assigned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return [ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])]
    return []


def _parameters(node: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """All parameters by name, and those without a default."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    free = positional[: len(positional) - len(given.defaults)]
    keyword = [a for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [a.arg for a in (*positional, *given.kwonlyargs)], [a.arg for a in (*free, *keyword)]
