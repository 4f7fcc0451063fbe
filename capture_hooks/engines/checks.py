"""What is checked before an engine is started, since an engine would fail only after minutes.

The installed engine is read from its source with `ast`: importing it takes seconds, and its processes run
elsewhere anyway.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from ..errors import EngineError, ModelError
from ..heads import HeadDescription

#: What a config may call the number of layers.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
#: What the config of a multimodal model's text decoder is called.
_TEXT: Final = ("text", "llm", "language")


@dataclass(frozen=True, slots=True)
class Feature:
    """A function, class or value of an engine that a plugin wraps, calls or sets.

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


def check_target(head: HeadDescription, model: Path) -> None:
    """Compare the target's ``config.json`` with what the head was trained on.

    A model that is no directory (a hub name) is left to the server, which compares before it captures.

    Raises:
        ModelError: a directory without a readable config.
        EngineError: another family, depth, width or vocabulary.
    """
    if not model.is_dir():
        if model.is_absolute() or str(model).startswith((".", "~")):
            raise ModelError(f"{model} is not a directory; give the target's, or its name on the hub")
        return
    try:
        config: Any = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{model} is no model that can be served: {error}") from None
    target = head.target
    assert target is not None
    parts = list(_parts(config))
    text = next((part for part in parts if _first(part, _LAYERS) and _first(part, ("vocab_size",))), {})
    differ = [
        f"{found} {what} instead of {wanted}"
        for what, wanted, names in (
            ("layers", target.n_layers, _LAYERS),
            ("values in a state", target.hidden_size, _HIDDEN),
            ("tokens", target.vocab_size, ("vocab_size",)),
        )
        if (found := _first(text, names)) is not None and found != wanted
    ]
    families = [str(part["model_type"]) for part in parts if part.get("model_type")]
    if target.model_type and families and target.model_type not in families:
        differ.insert(0, f"of the family {families[0]!r} instead of {target.model_type!r}")
    if differ:
        raise EngineError(
            f"{head.directory} was trained on another target ({target.architecture}): {model} is or has "
            f"{', '.join(differ)}"
        )


def check_port(bind: str, port: int) -> None:
    """Check that nothing else listens on the address and port of the server.

    Args:
        bind: the address it listens on; empty for every one.
        port: the port.

    Raises:
        EngineError: the address cannot be had.
    """
    if port > 65535:  # getaddrinfo would take the rest of it
        raise EngineError(f"port {port} cannot be had: ports end at 65535")
    try:
        found = socket.getaddrinfo(bind or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], found[1]) as trial:
            # As the server will: a connection that is closing does not count.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(found[4])
    except OSError as error:
        raise EngineError(
            f"port {port} on {bind} cannot be had ({error.strerror}): "
            "stop what uses it, or give another one: -- --port N"
        ) from None


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    """A config and those nested in it, what calls itself a text's first (a multimodal model's decoder)."""
    if isinstance(config, dict):
        yield config
        nested = [name for name in config if name.endswith("_config")]
        for name in sorted(nested, key=lambda name: not any(word in name for word in _TEXT)):
            yield from _parts(config[name])


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
