"""Heads without a capture section: someone else's, whose integers do not say which states they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from ..errors import ConventionError, HeadError
from ..plugins import registry

#: Architectures of raw EAGLE-3 checkpoints, and the provider that reads them.
PROVIDERS: Final = {"LlamaForCausalLMEagle3": "eagle3", "Eagle3LlamaForCausalLM": "eagle3"}
#: What SGLang 0.5.23 and vLLM 0.33 take where a raw checkpoint leaves a flag out.
ABSENT: Final = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_KEYS: Final = ("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def provider_name(config: Mapping[str, Any], where: str) -> str:
    """The provider that reads a foreign head.

    Raises:
        HeadError: the architecture is none that is known.
    """
    architectures = config.get("architectures") or []
    for architecture in architectures:
        if architecture in PROVIDERS:
            return PROVIDERS[architecture]
    raise HeadError(
        f"{where}: architectures is {architectures!r}; a head of another library "
        f"can be read when it is {' or '.join(PROVIDERS)}"
    )


def ambiguous(config: Mapping[str, Any], n_layers: int, where: str) -> HeadError:
    """The error for a head whose spec was not given: what each library would take its ids for."""
    lines = [
        f"{where}: this head has no capture section, and layer ids alone do not say "
        "which hidden states they mean; pass the spec it was trained on, for example "
        "spec=CaptureSpec.parse('post.1, post.14, post.26')"
    ]
    for key in _KEYS:
        ids = _lookup(config, key)
        if ids is None:
            lines.append(f"  it has no {key}")
            continue
        lines.append(f"  {key} = {ids!r} would mean:")
        lines += [f"    {reading}: {', '.join(names)}" for reading, names in _readings(ids, n_layers).items()]
    return HeadError("\n".join(lines))


def normalised(config: Mapping[str, Any], inputs: int, target_hidden: int) -> dict[str, Any]:
    """A raw checkpoint's config with the settings that stock readers would fill in."""
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    filled = {**ABSENT, **config}
    filled["norm_before_fc"] = nested.get("norm_before_fc", filled["norm_before_fc"])
    filled.setdefault("num_aux_hidden_states", inputs)
    filled.setdefault("target_hidden_size", target_hidden)
    if filled.get("draft_vocab_size") is None:
        filled["draft_vocab_size"] = filled.get("vocab_size")
    if filled.get("head_dim") is None and filled.get("hidden_size") and filled.get("num_attention_heads"):
        filled["head_dim"] = filled["hidden_size"] // filled["num_attention_heads"]
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = filled.get("num_attention_heads")
    if not filled.get("rope_parameters"):
        scaling = dict(filled.get("rope_scaling") or {})
        scaling.setdefault("rope_type", scaling.pop("type", "default"))
        filled["rope_parameters"] = {**scaling, "rope_theta": filled.get("rope_theta", 10000.0)}
    return filled


def renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The usual names of tensors that others call ``layers.0.*`` (``midlayer.*``) or ``model.*``."""
    names = {name: name.removeprefix("model.") for name in tensors}
    return {
        f"midlayer.{short.removeprefix('layers.0.')}" if short.startswith("layers.0.") else short: tensors[
            name
        ]
        for name, short in names.items()
    }


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _readings(ids: Any, n_layers: int) -> dict[str, list[str]]:
    """Conventions by what they read, or by why they cannot."""
    found: dict[str, list[str]] = {}
    for name, convention in registry().conventions.items():
        try:
            reading = ", ".join(str(point) for point in convention.to_points(ids, n_layers))
        except ConventionError as error:
            reading = f"nothing ({error})"
        found.setdefault(reading, []).append(name)
    return found
