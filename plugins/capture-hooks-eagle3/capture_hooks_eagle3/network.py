"""The head's modules, and the arithmetic that training and drafting share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Eagle3Config, Sizes
from .functional import rms_norm, swiglu
from .rope import RotaryTable, inverse_frequencies


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


class Network(nn.Module):
    """Embedding, ``fc`` with its norms, decoder layers, ``norm`` and ``lm_head``.

    ``input_scale`` [K*H] multiplies what ``fc`` reads; see `Eagle3Head.calibrate`.  ``fc_learnt`` is
    the first column of ``fc`` that is not random: 0 in a restored head, past the end in a fresh one.
    """

    embedding: Tensor
    input_scale: Tensor
    draft_ids: Tensor

    def __init__(
        self,
        config: Eagle3Config,
        inputs: int,
        embedding: Tensor,
        draft_token_ids: Tensor,
        vocab_size: int,
    ) -> None:
        """Random weights.

        Args:
            config: every architecture setting given.
            inputs: captured states, K.
            embedding: [V, H] shared, and copied only where it is to be trained.
            draft_token_ids: [D] int64 ascending.
            vocab_size: tokens of the target.
        """
        super().__init__()
        self.config, self.sizes, self.inputs = config, config.sizes(), inputs
        self.vocab_size = vocab_size
        self.hidden_size = hidden = embedding.shape[1]
        if inputs > 1:
            self.fc = nn.Linear(inputs * hidden, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(inputs * hidden)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden) for _ in range(inputs))
        self.layers = nn.ModuleList(Layer(self.sizes, hidden, first=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, draft_token_ids.shape[0], bias=False)
        self.lm_head.weight.requires_grad_(config.train_lm_head)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        self.register_buffer("input_scale", torch.ones(inputs * hidden))
        self.fc_learnt = inputs * hidden
        if config.train_embedding:
            own = embedding.detach().to(torch.get_default_dtype(), copy=True)
            self.register_parameter("embedding", nn.Parameter(own))
        else:
            self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("draft_ids", draft_token_ids.clone())
        self.rotary = RotaryTable(
            *inverse_frequencies(self.sizes.rope, self.sizes.head_dim, self.sizes.max_position_embeddings)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the head's own weights and of its residual stream."""
        return self.norm.weight.dtype

    @property
    def decoder_layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def normed(self, x: Tensor, norm: nn.Module, out: torch.dtype | None = None) -> Tensor:
        """``norm`` (an `RMSNorm`) applied to ``x``, as ``out``."""
        assert isinstance(norm, RMSNorm)
        return rms_norm(x, norm.weight, self.sizes.rms_norm_eps, out)

    def features(self, states: Tensor) -> Tensor:
        """Captured states [T, K*H] after the norms before ``fc``."""
        x = states.to(self.dtype)
        if self.config.norm_before_fc:
            return self.normed(x, self.input_norm)
        if self.config.fc_norm:
            parts = zip(x.chunk(self.inputs, -1), self.fc_norm, strict=True)
            return torch.cat([self.normed(part, norm) for part, norm in parts], -1)
        return x

    def combine(self, states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """What layer 0 gets for captured states [T, K*H]: norms, scale, noise in training, ``fc``."""
        x = self.features(states)
        if self.inputs > 1:
            x = x * self.input_scale
        if self.training and self.config.feature_noise:
            x = x * torch.randn_like(x).mul_(self.config.feature_noise).add_(1)
        if self.inputs == 1:
            return x
        dtype = dtype or self.dtype
        return F.linear(x.to(dtype), self.fc.weight.to(dtype)).to(self.dtype)

    def embedded(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """``input_layernorm(embedding)`` of tokens, as layer 0 reads it."""
        rows = F.embedding(ids, self.embedding).to(self.dtype)
        return self.normed(rows, self.decoder_layers[0].input_layernorm, dtype)

    def read(self, index: int, h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What layer ``index`` reads of ``h``, and its residual."""
        layer = self.decoder_layers[index]
        if not layer.first:
            return self.normed(h, layer.input_layernorm, dtype), h
        if self.config.norm_before_residual:
            residual = self.normed(h, layer.hidden_norm)
            return residual.to(dtype), residual
        return self.normed(h, layer.hidden_norm, dtype), h

    def rest(
        self, index: int, weights: LayerWeights | StepWeights, residual: Tensor, mixed: Tensor
    ) -> Tensor:
        """Layer ``index`` after its attention: output projection, residual, MLP."""
        x = residual + F.linear(mixed, weights.out)
        read = self.normed(x, self.decoder_layers[index].post_attention_layernorm, mixed.dtype)
        return x + F.linear(swiglu(F.linear(read, weights.gate_up)), weights.down)

    def readout(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., D] of what a step feeds back."""
        if not self.config.norm_output:
            hidden = self.normed(hidden, self.norm)
        return F.linear(hidden, self.lm_head.weight)
