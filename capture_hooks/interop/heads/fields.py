"""The draft's sizes and RoPE, from whichever spelling its config has them in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import HeadError
from . import keys
from .contract import RawHead
from .draft import Target

_NEEDED: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
)


def fields_of(raw: RawHead, target: Target, where: str) -> dict[str, Any]:
    """Every field of the draft, filled in as all readers fill it in, and checked against its target.

    Raises:
        HeadError: one is missing, or is another than the target's.
    """
    found = {key: raw.fields.get(key) for key in (*keys.SIZES, *keys.TOKENS)}
    if missing := [key for key in _NEEDED if found[key] is None]:
        raise HeadError(f"{where}: its config gives no {', '.join(missing)}")
    found["model_type"] = found["model_type"] or "llama"
    found["num_key_value_heads"] = found["num_key_value_heads"] or found["num_attention_heads"]
    found["head_dim"] = found["head_dim"] or raw.fields["hidden_size"] // raw.fields["num_attention_heads"]
    for bias in ("attention_bias", "mlp_bias"):
        found[bias] = bool(found[bias])
    found["rope_parameters"] = rope_of(raw.fields, where)
    found["draft_vocab_size"] = raw.fields.get("draft_vocab_size") or found["vocab_size"]
    found["target_hidden_size"] = raw.fields.get("target_hidden_size") or target.hidden_size
    for key, value in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        if found[key] != value:
            raise HeadError(f"{where}: {key} is {found[key]}, and the target's is {value}")
    return found


def rope_of(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``rope_parameters`` (transformers 5) from any of the spellings; theta 10000 where none gives one.

    Raises:
        HeadError: two spellings disagree.
    """
    new = dict(fields.get("rope_parameters") or {})
    old = dict(fields.get("rope_scaling") or {})
    for settings in (new, old):
        if "type" in settings:
            settings.setdefault("rope_type", settings["type"])
            del settings["type"]
    theta = [s["rope_theta"] for s in (new, old, fields) if s.get("rope_theta") is not None]
    if any(value != theta[0] for value in theta):
        raise HeadError(f"{where}: rope_theta is {theta[0]} and {theta[-1]} in two places of its config")
    scaling = [{k: v for k, v in s.items() if k != "rope_theta"} for s in (new, old)]
    scaling = [{"rope_type": "default", **s} for s in scaling if s]
    if any(s != scaling[0] for s in scaling):
        raise HeadError(
            f"{where}: rope_parameters is {scaling[0]} and rope_scaling {scaling[1]}; readers of one and of "
            "the other would turn the head differently"
        )
    return {
        **(scaling[0] if scaling else {"rope_type": "default"}),
        "rope_theta": theta[0] if theta else 10000.0,
    }
