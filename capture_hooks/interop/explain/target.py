"""What is known of the target: from a model, from the head's own section, or from what the user says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...errors import ModelError
from ...heads.config import CaptureSection
from ...store.manifest import Manifest
from .report import Target

#: Text decoders inside multimodal configs, in the order transformers looks for them.
_TEXT: Final = ("text_config", "decoder", "generator", "text", "language_config", "llm_config")

#: Of the largest model that is believed: conventions list its layers.
_MOST_LAYERS: Final = 100_000


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target as the checks need it.

    Attributes:
        target: its shape.
        split: boundaries at which it adds something between layers; None where that was not looked up.
        config: its text decoder's configuration; None where no model was given.
    """

    target: Target
    split: frozenset[int] | None = None
    config: Mapping[str, Any] | None = None


def from_model(name: str) -> TargetFacts:
    """A local directory or a hub id; only its config is read.

    Raises:
        ModelError: there is no such model, or its config gives no number of layers.
    """
    document = _document(name)
    text = _text_config(document)
    family = document.get("model_type")
    n_layers = _whole(text, "num_hidden_layers", "n_layer", "num_layers")
    if not isinstance(family, str) or n_layers is None:
        raise ModelError(
            f"{name}: its config has no model_type or no num_hidden_layers; is it a language model?"
        )
    return TargetFacts(
        Target(
            family=family,
            n_layers=n_layers,
            hidden_size=_whole(text, "hidden_size", "n_embd", "d_model"),
            vocab_size=_whole(text, "vocab_size"),
            by=f"the config of {name}",
        ),
        _split_boundaries(name),
        text,
    )


def from_section(section: CaptureSection) -> TargetFacts:
    """The fingerprint that a head of ours carries."""
    print_ = section.target
    return TargetFacts(
        Target(
            family=print_.model_type,
            n_layers=print_.n_layers,
            hidden_size=print_.hidden_size,
            vocab_size=print_.vocab_size,
            by="the head's capture section",
        )
    )


def from_manifest(manifest: Manifest) -> TargetFacts:
    """The fingerprint that a dump of ours carries."""
    print_ = manifest.fingerprint
    target = Target(
        family=print_.model_type,
        n_layers=print_.n_layers,
        hidden_size=print_.hidden_size,
        vocab_size=print_.vocab_size,
        by="the dump's manifest",
    )
    return TargetFacts(target, frozenset(manifest.split_boundaries))


def from_words(family: str | None, n_layers: int | None) -> TargetFacts:
    """What the user says; what is left out stays unknown.

    Raises:
        ModelError: a number of layers that no model has.
    """
    if n_layers is not None and not 1 <= n_layers <= _MOST_LAYERS:
        raise ModelError(
            f"a model of {n_layers} layers cannot be; --layers counts the target's decoder layers"
        )
    said = " and ".join(
        word for word, value in (("--family", family), ("--layers", n_layers)) if value is not None
    )
    return TargetFacts(Target(family=family, n_layers=n_layers, by=said or "not known"))


def corrected(recorded: TargetFacts, family: str | None, n_layers: int | None) -> TargetFacts:
    """A recorded target with what the user says instead.

    Raises:
        ModelError: a number of layers that no model has.
    """
    said = from_words(family, n_layers).target
    update = {name: value for name in ("family", "n_layers") if (value := getattr(said, name)) is not None}
    by = f"{said.by}; the rest from {recorded.target.by}"
    return replace(recorded, target=recorded.target.model_copy(update={**update, "by": by}))


def _document(name: str) -> dict[str, Any]:
    """The config: as transformers reads it (its defaults filled in), else the file as it stands."""
    from ...target import load_whole_config, locate

    try:
        config = load_whole_config(name)
        filled = dict(config.to_dict())
        for part in _TEXT:
            inner = getattr(config, part, None)
            if inner is not None and hasattr(inner, "to_dict"):
                filled[part] = dict(inner.to_dict())
        return filled
    except (
        Exception
    ):  # a model type of its own code, a config that its class refuses: the JSON has what is needed
        pass
    path = Path(locate(name).base) / "config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise ModelError(
            f"cannot read the config of the model {name}; give its directory or hub id"
        ) from None
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds a JSON {type(document).__name__}; a model's config is an object")
    return document


def _text_config(document: Mapping[str, Any]) -> Mapping[str, Any]:
    for part in _TEXT:
        inner = document.get(part)
        if isinstance(inner, dict) and "num_hidden_layers" in inner:
            return inner
    return document


def _split_boundaries(name: str) -> frozenset[int] | None:
    """Boundaries where the model adds something; None where this process cannot build its skeleton."""
    from ...capture import find_anatomy
    from ...target import skeleton

    try:
        return frozenset(find_anatomy(skeleton(name)).split_boundaries)
    except Exception:  # no transformers, no anatomy, or whatever a class raises for a config it cannot take
        return None


def _whole(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None
