"""How many tokens a target reads."""

from __future__ import annotations

from typing import Any


def context_length(model: Any) -> int | None:
    """Tokens a model was made to read; None where its configuration does not say.

    A dynamic RoPE stretches ``max_position_embeddings`` by its factor (transformers 5.24,
    modeling_rope_utils.py).

    Args:
        model: a model, or its configuration.
    """
    config = getattr(model, "config", model)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    length = getattr(text, "max_position_embeddings", None)
    if not length:
        return None
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    factors = [kind["factor"] for kind in kinds if kind.get("rope_type") == "dynamic" and "factor" in kind]
    return int(length * min(factors, default=1))
