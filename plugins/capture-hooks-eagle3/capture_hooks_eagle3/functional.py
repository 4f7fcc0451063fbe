"""The small operations of a Llama-type layer, each saving only what its backward needs."""

# torch leaves autograd.Function's methods and Function.apply untyped.
# mypy: disable-error-code="no-untyped-call, override, type-arg, misc"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to add up in: float64 stays, everything else in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, out: torch.dtype) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        unit = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        product = grad * unit
        d_weight = product.flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None, None
        mean = product.mul_(weight).mean(-1, keepdim=True)
        d_x = (grad * weight).addcmul_(unit, mean, value=-1).mul_(scale)
        return d_x.to(x.dtype), d_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: torch.dtype | None = None) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, computed in at least float32, given as ``out``."""
    return _RMSNorm.apply(x, weight, eps, out or x.dtype)  # type: ignore[no-any-return]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last dimension."""
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return]


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in Llama's layout (channel i pairs with i + d/2) of x [T, heads, d]; cos, sin [T, d/2]."""
    return _Rotate.apply(x, cos.unsqueeze(1), sin.unsqueeze(1))  # type: ignore[no-any-return]
