"""What is refused before any server is started: cheap to see now, minutes later otherwise."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import EngineError, ModelError
from ..heads import HeadDescription

#: What a config may call the number of layers.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
#: What the config of a multimodal model's text decoder is called.
_TEXT: Final = ("text", "llm", "language")


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
    """Nothing else listens where the server will.

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
