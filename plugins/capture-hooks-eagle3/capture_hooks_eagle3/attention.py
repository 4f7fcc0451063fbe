"""Attention of training-time test: a causal context plus a row's own drafted keys, in one softmax.

At step j a row sees the step-0 rows up to its own (a causal triangle over the sequence) and its own
rows of steps 1..j (a diagonal: D extra keys per row).  Scores exist one block of rows at a time and
are computed again in the backward pass, so memory grows with rows, not with rows squared.
"""

# mypy: disable-error-code="no-untyped-call, override, type-arg, misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .functional import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Block:
    """Query rows ``q_start:q_end`` of one sequence and the context rows ``k_start:k_end`` they can see."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int


@dataclass(frozen=True, slots=True)
class Queries:
    """Which rows ask: their positions [Q] in their sequences, and the blocks that cover them."""

    positions: Tensor
    blocks: tuple[Block, ...]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Queries,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
) -> Tensor:
    """Attention output [Q, heads, d].

    Args:
        q: [Q, heads, d] rotated queries.
        k: [C, kv_heads, d] rotated keys of the packed context rows.
        v: their values.
        queries: positions and blocks; a query at position p sees its sequence's context rows 0..p.
        own_k: [Q, D, kv_heads, d] the further keys each query alone sees.
        own_v: their values.
    """
    return _Attend.apply(q, k, v, own_k, own_v, queries)  # type: ignore[no-any-return]


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[T, heads, d] -> [kv_heads, group * T, d]: one matrix product serves a whole group of heads."""
    rows, heads, width = x.shape
    return x.view(rows, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3).reshape(kv_heads, -1, width)


def _ungrouped(x: Tensor, rows: int) -> Tensor:
    kv_heads, _, width = x.shape
    return x.view(kv_heads, -1, rows, width).permute(2, 0, 1, 3).reshape(rows, -1, width)


def _weights(q: Tensor, k: Tensor, own_k: Tensor | None, positions: Tensor) -> Tensor:
    """Softmax weights [kv_heads, group, T, C + D] of one block; ``q`` [kv_heads, group * T, d] is scaled."""
    rows, keys = positions.shape[0], k.shape[1]
    scores = torch.matmul(q, k.transpose(1, 2)).view(k.shape[0], -1, rows, keys)
    scores = scores.to(accumulation_dtype(q.dtype))
    unseen = positions.unsqueeze(1) < torch.arange(keys, device=q.device)
    scores.masked_fill_(unseen, float("-inf"))
    if own_k is not None:
        own = (q.view(*scores.shape[:3], 1, -1) * own_k).sum(-1, dtype=scores.dtype)
        scores = torch.cat([scores, own], -1)
    return scores.softmax(-1)


def _own(x: Tensor | None, block: Block) -> Tensor | None:
    """[Q, D, kv_heads, d] -> this block's [kv_heads, 1, T, D, d]."""
    return None if x is None else x[block.q_start : block.q_end].permute(2, 0, 1, 3).unsqueeze(1)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        queries: Queries,
    ) -> Tensor:
        kv_heads, scale, out = k.shape[1], q.shape[-1] ** -0.5, torch.empty_like(q)
        for b in queries.blocks:
            rows = slice(b.q_start, b.q_end)
            q_b = _grouped(q[rows] * scale, kv_heads)
            k_b, v_b = (x[b.k_start : b.k_end].transpose(0, 1) for x in (k, v))
            weights = _weights(q_b, k_b, _own(own_k, b), queries.positions[rows]).to(q.dtype)
            context = weights[..., : k_b.shape[1]].reshape(kv_heads, -1, k_b.shape[1])
            result = torch.matmul(context, v_b)
            own_v_b = _own(own_v, b)
            if own_v_b is not None:
                own = weights[..., k_b.shape[1] :].unsqueeze(-1)
                result = result + (own * own_v_b).sum(-2).view_as(result)
            out[rows] = _ungrouped(result, b.q_end - b.q_start)
        ctx.queries = queries
        ctx.save_for_backward(q, k, v, own_k, own_v, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, own_k, own_v, out = ctx.saved_tensors
        queries: Queries = ctx.queries
        kv_heads, scale, wide = k.shape[1], q.shape[-1] ** -0.5, accumulation_dtype(q.dtype)
        d_q = torch.empty_like(q)
        d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        d_own_k, d_own_v = (None if x is None else torch.empty_like(x) for x in (own_k, own_v))
        delta = (grad * out).sum(-1, dtype=wide)
        for b in queries.blocks:
            rows, keys = slice(b.q_start, b.q_end), slice(b.k_start, b.k_end)
            n = b.k_end - b.k_start
            q_b, grad_b = _grouped(q[rows] * scale, kv_heads), _grouped(grad[rows], kv_heads)
            k_b, v_b = k[keys].transpose(0, 1), v[keys].transpose(0, 1)
            own_k_b, own_v_b = _own(own_k, b), _own(own_v, b)
            weights = _weights(q_b, k_b, own_k_b, queries.positions[rows])
            delta_b = _grouped(delta[rows].unsqueeze(-1), kv_heads).view(*weights.shape[:3], 1)
            context = weights[..., :n].to(q.dtype).reshape(kv_heads, -1, n)
            d_v[keys] += torch.matmul(context.transpose(1, 2), grad_b).transpose(0, 1)
            d_scores = torch.matmul(grad_b, v_b.transpose(1, 2)).view(*weights.shape[:3], n)
            d_scores = (d_scores.to(wide) - delta_b).mul_(weights[..., :n]).to(q.dtype).view(kv_heads, -1, n)
            d_q_b = torch.matmul(d_scores, k_b)
            d_k[keys] += torch.matmul(d_scores.transpose(1, 2), q_b).transpose(0, 1)
            if own_k_b is not None and own_v_b is not None and d_own_k is not None and d_own_v is not None:
                own = weights[..., n:]
                grad_rows, q_rows = (x.view(*weights.shape[:3], 1, -1) for x in (grad_b, q_b))
                d_own = (
                    (grad_rows * own_v_b)
                    .sum(-1, dtype=wide)
                    .sub_(delta_b)
                    .mul_(own)
                    .to(q.dtype)
                    .unsqueeze(-1)
                )
                own = own.to(q.dtype).unsqueeze(-1)
                d_q_b = d_q_b + (d_own * own_k_b).sum(-2).view_as(d_q_b)
                d_own_k[rows] = (d_own * q_rows).sum(1).permute(1, 2, 0, 3)
                d_own_v[rows] = (own * grad_rows).sum(1).permute(1, 2, 0, 3)
            d_q[rows] = _ungrouped(d_q_b, b.q_end - b.q_start) * scale
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype), d_own_k, d_own_v, None
