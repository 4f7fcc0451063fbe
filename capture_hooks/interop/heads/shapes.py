"""The tensors that a Llama-type EAGLE-3 draft has, and their shapes, from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ...errors import HeadError
from .draft import Computes


def check_tensors(
    tensors: Mapping[str, Tensor], fields: Mapping[str, Any], computes: Computes, inputs: int, where: str
) -> None:
    """Check that every tensor of the draft is there, and has the shape that its config asks for.

    Raises:
        HeadError: naming the tensor and both shapes, or the flag that it contradicts.
    """
    wanted = dict(shapes(fields, computes, inputs))
    missing = sorted(
        name for name in wanted if name not in tensors and name not in ("embed_tokens.weight", "d2t")
    )
    if missing:
        raise HeadError(f"{where} lacks {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}")
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise HeadError(
                f"{where}: {name} is {list(tensors[name].shape)}, and its config asks for {list(shape)}"
            )
    for name, flag in (
        ("input_norm.weight", "norm_before_fc"),
        ("fc_norm.0.weight", "fc_norm"),
        ("midlayer.self_attn.q_proj.bias", "attention_bias"),
        ("midlayer.mlp.gate_proj.bias", "mlp_bias"),
    ):
        if name in tensors and name not in wanted:
            raise HeadError(
                f"{where} holds {name}, and its config does not say {flag}: readers would leave it out"
            )


def shapes(
    fields: Mapping[str, Any], computes: Computes, inputs: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Canonical name and shape of every tensor, the optional ``embed_tokens.weight`` and ``d2t`` among them.

    Layer 0 reads ``[input_layernorm(embedding), hidden_norm(h)]``, so its q, k and v are 2H wide.
    """
    hidden, inner, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
    width = inputs * fields["target_hidden_size"]
    yield "fc.weight", (hidden, width)
    if computes.norm_before_fc:
        yield "input_norm.weight", (width,)
    if computes.fc_norm:
        for index in range(inputs):
            yield f"fc_norm.{index}.weight", (fields["target_hidden_size"],)
    if computes.norm_before_lm_head:
        yield "norm.weight", (hidden,)
    yield "lm_head.weight", (fields["draft_vocab_size"], hidden)
    yield "embed_tokens.weight", (fields["vocab_size"], hidden)
    yield "d2t", (fields["draft_vocab_size"],)
    for index in range(fields["num_hidden_layers"]):
        layer = f"layers.{index}" if index else "midlayer"
        read = hidden if index else 2 * hidden
        matrices = {
            "self_attn.q_proj": (queries, read),
            "self_attn.k_proj": (keys, read),
            "self_attn.v_proj": (keys, read),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        for name, shape in matrices.items():
            yield f"{layer}.{name}.weight", shape
            if fields["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                yield f"{layer}.{name}.bias", shape[:1]
        yield f"{layer}.input_layernorm.weight", (hidden,)
        if index == 0:
            yield f"{layer}.hidden_norm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
