"""The head's modules and the arithmetic that training and drafting share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .config import Eagle3Config
from .functional import rms_norm, swiglu
from .layers import Layer, LayerWeights, RMSNorm, StepWeights
from .rope import RotaryTable, inverse_frequencies


class Network(nn.Module):
    """Embedding, ``fc`` with its norms, decoder layers, ``norm`` and ``lm_head``.

    ``input_scale`` [K*H] multiplies what ``fc`` reads; see `Eagle3Head.calibrate`.  ``fc_learnt`` is
    the first column of ``fc`` that is not random: 0 in a restored head, past the end in a fresh one.
    """

    embedding: Tensor
    input_scale: Tensor

    def __init__(self, config: Eagle3Config, inputs: int, embedding: Tensor, draft_size: int) -> None:
        """Random weights; ``embedding`` [V, H] is shared, and copied only where it is to be trained."""
        super().__init__()
        self.config, self.sizes, self.inputs = config, config.sizes(), inputs
        self.hidden_size = hidden = embedding.shape[1]
        if inputs > 1:
            self.fc = nn.Linear(inputs * hidden, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(inputs * hidden)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden) for _ in range(inputs))
        self.layers = nn.ModuleList(Layer(self.sizes, hidden, first=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, draft_size, bias=False)
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
