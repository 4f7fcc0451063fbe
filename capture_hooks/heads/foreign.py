"""Heads without a capture section: someone else's, whose integers do not say which states they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from torch import Tensor

from ..conventions import convention_for
from ..errors import ConventionError, HeadError
from ..plugins import registry
from ..spec import CaptureSpec

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


def ambiguous(config: Mapping[str, Any], n_layers: int, model_type: str, where: str) -> HeadError:
    """The error for a head whose spec was not given: what each library would take its ids for."""
    lines = [
        f"{where}: this head has no capture section, and layer ids alone do not say "
        "which hidden states they mean; pass the spec it was trained on, for example "
        "spec=CaptureSpec.parse('post.1, post.14, post.26')"
    ]
    for key in _KEYS:
        ids = _lookup(config, key)
        if ids is None:
            default = f", usually {CaptureSpec.eagle3(n_layers)}" if n_layers >= 6 else ""
            lines.append(f"  it has no {key}: a reader of that key takes its own default layers{default}")
            continue
        lines.append(f"  {key} = {ids!r} would mean:")
        lines += [f"    to {reading}" for reading in _readings(ids, n_layers, model_type)]
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


def _readings(ids: Any, n_layers: int, model_type: str) -> Iterator[str]:
    """What each library would read in ``ids`` for a target of this family, or why it cannot."""
    for library in sorted({convention.library for convention in registry().conventions.values()}):
        try:
            convention = convention_for(library, model_type)
            points = convention.to_points(ids, n_layers)
        except ConventionError as error:
            yield f"{library}: {error}"
        else:
            yield f"{library} {convention.versions}: {', '.join(map(str, points))}"
