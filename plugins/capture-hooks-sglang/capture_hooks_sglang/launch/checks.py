"""What is refused before a server is started: cheap to see now, minutes later otherwise."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from capture_hooks.conventions import engine_ids
from capture_hooks.errors import ConventionError, EngineError, ModelError
from capture_hooks.heads import HeadDescription
from capture_hooks.heads.config import CaptureSection
from capture_hooks.heads.engines import SGLANG_KEY
from capture_hooks.heads.files import read_config

from ..serving.asked import Asked, what_is_asked
from .command import Command, plain

#: The entry point by which SGLang finds the plugin.
_GROUP: Final = "sglang.srt.plugins"
_PLUGIN: Final = "capture_hooks"
#: What a config may call the number of layers.
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model")
#: What the config of a multimodal model's text decoder is called.
_TEXT: Final = ("text", "llm", "language")


def check_head(head: Path, model: Path, environment: Mapping[str, str]) -> Asked:
    """What the server will be asked to capture.

    Raises:
        HeadError: no head, a damaged one, or one whose section this version cannot read.
        SpecError: ``CAPTURE_HOOKS_SPEC`` is no spec, or names a layer that the target has not.
        EngineError: a head without a capture section; one that SGLang's draft worker would compute otherwise
            than it was trained; a setting with another value than it takes.
    """
    if "capture" not in read_config(head):
        raise EngineError(
            f"{head} has no capture section: nothing says what it was trained on, so there is nothing to "
            f"prove; train or save it with capture-hooks, or serve it unproven: {plain(head, model)}"
        )
    asked = what_is_asked(environment, str(head))
    assert asked is not None
    assert asked.head is not None
    assert asked.head.section is not None
    if own := _own_arithmetic(asked.head.section):
        raise EngineError(
            f"SGLang's draft worker would not compute what {head} was trained to: {'; '.join(own)}; "
            "no wiring changes that"
        )
    asked.spec.absolute(asked.head.section.target.n_layers)
    return asked


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
        raise ModelError(f"{model} is no model that SGLang can serve: {error}") from None
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


def check_plugin_loads(environment: Mapping[str, str]) -> None:
    """SGLang will find the plugin, and is not told to leave it out.

    Raises:
        EngineError: it would serve without it.
    """
    if not any(point.name == _PLUGIN for point in metadata.entry_points(group=_GROUP)):
        raise EngineError(
            f"no installed distribution declares {_PLUGIN} in the entry-point group {_GROUP}, so SGLang "
            "would not load the plugin: install capture-hooks-sglang again"
        )
    allowed = [name.strip() for name in environment.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and _PLUGIN not in allowed:
        raise EngineError(
            f"SGLANG_PLUGINS is {environment['SGLANG_PLUGINS']!r}, which leaves {_PLUGIN} out: SGLang would "
            f"serve the head without any check; add {_PLUGIN} to it, or unset it"
        )


def check_port(command: Command) -> None:
    """Nothing else listens where the server will.

    Raises:
        EngineError: the address cannot be had.
    """
    if command.port > 65535:  # getaddrinfo would take the rest of it
        raise EngineError(f"port {command.port} cannot be had: ports end at 65535")
    try:
        found = socket.getaddrinfo(command.bind or None, command.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0], found[1]) as trial:
            # As the server will: a connection that is closing does not count.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(found[4])
    except OSError as error:
        raise EngineError(
            f"port {command.port} on {command.bind} cannot be had ({error.strerror}): "
            "stop what uses it, or give another one: -- --port N"
        ) from None


def _own_arithmetic(section: CaptureSection) -> list[str]:
    """Why SGLang's draft worker cannot compute this head, without what only ids cannot say.

    The section lists both kinds of reasons; those about ids are composed anew here, to tell them apart.
    """
    target = section.target
    spec = section.capture_spec
    points = [spec.inputs[i] for i in section.order]
    try:
        ids = engine_ids("sglang", points, target.n_layers, target.model_type, SGLANG_KEY).excluded
    except ConventionError:
        ids = None
    between = f"{target.model_type} adds something to the stream between layers"
    reasons = [why for s in section.engines if s.engine == "sglang" for why in s.excluded]
    return [why for why in reasons if why != ids and not why.startswith(between)]


def _parts(config: Any) -> Iterator[Mapping[str, Any]]:
    """A config and those nested in it, what calls itself a text's first (a multimodal model's decoder)."""
    if isinstance(config, dict):
        yield config
        nested = [name for name in config if name.endswith("_config")]
        for name in sorted(nested, key=lambda name: not any(word in name for word in _TEXT)):
            yield from _parts(config[name])


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)
