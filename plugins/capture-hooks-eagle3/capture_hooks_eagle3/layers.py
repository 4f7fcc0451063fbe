"""A decoder layer of the head: modules under the field's names, and its weights laid out for speed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .config import Sizes


class RMSNorm(nn.Module):
    """Holds a gain [width]; the arithmetic is `functional.rms_norm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


class Attention(nn.Module):
    """The four projections; ``width`` is what q, k and v read (2H in layer 0)."""

    def __init__(self, width: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)


class MLP(nn.Module):
    """SwiGLU's three projections."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Layer(nn.Module):
    """Layer 0 reads ``[input_layernorm(embedding), hidden_norm(h)]``; the others are Llama's."""

    def __init__(self, sizes: Sizes, hidden: int, *, first: bool) -> None:
        super().__init__()
        self.first = first
        width = 2 * hidden if first else hidden
        self.self_attn = Attention(width, hidden, sizes.heads, sizes.kv_heads, sizes.head_dim)
        self.mlp = MLP(hidden, sizes.intermediate_size)
        self.input_layernorm = RMSNorm(hidden)
        if first:
            self.hidden_norm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's matrices in the dtype to multiply in; keys and values, gate and up fused.

    In layer 0 the columns are split: what a token's embedding contributes to q, k and v does not
    depend on the step, so it is computed once per token and added.
    """

    q: Tensor
    kv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    embed_q: Tensor | None
    embed_kv: Tensor | None

    def embedding_columns(self) -> tuple[Tensor, Tensor]:
        """Layer 0's columns for the embedding, of q and of k and v."""
        assert self.embed_q is not None
        assert self.embed_kv is not None
        return self.embed_q, self.embed_kv


def layer_weights(layer: Layer, dtype: torch.dtype) -> LayerWeights:
    """Differentiable views and copies of ``layer``'s weights."""
    attention, mlp = layer.self_attn, layer.mlp
    q = attention.q_proj.weight.to(dtype)
    kv = torch.cat([attention.k_proj.weight, attention.v_proj.weight]).to(dtype)
    embed_q = embed_kv = None
    if layer.first:
        embed_q, q = (half.contiguous() for half in q.chunk(2, 1))
        embed_kv, kv = (half.contiguous() for half in kv.chunk(2, 1))
    return LayerWeights(
        q=q,
        kv=kv,
        out=attention.o_proj.weight.to(dtype),
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
        down=mlp.down_proj.weight.to(dtype),
        embed_q=embed_q,
        embed_kv=embed_kv,
    )


@dataclass(frozen=True, slots=True)
class StepWeights:
    """One layer's matrices for drafting, all columns together: a round is bound by reading weights."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


def step_weights(layer: Layer) -> StepWeights:
    """Fused copies of ``layer``'s weights as they are now."""
    attention, mlp = layer.self_attn, layer.mlp
    return StepWeights(
        qkv=torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]),
        out=attention.o_proj.weight,
        gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        down=mlp.down_proj.weight,
    )
