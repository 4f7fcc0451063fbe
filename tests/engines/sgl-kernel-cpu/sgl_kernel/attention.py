"""Attention over SGLang's paged KV cache: one token per request (decode), or many (extend).

Keys and values of request i are rows of ``k_buffer`` ``[slots, KH, D]`` and ``v_buffer`` ``[slots, KH, V]``,
found through ``req_to_token[req_pool_indices[i]]``; H query heads share KH of them in consecutive groups.
With multi-head latent attention (MLA) the cache holds one latent head and ``v_buffer`` is the first V columns
of ``k_buffer``.  SGLang 0.5.23 then asks for attention over the latents (decode, and extend after a prefix),
or, in a batch without any prefix, over keys and values given uncompressed
(``srt/models/deepseek_common/attention_backend_handler.py``, ``handle_attention_triton``).

A cache in float8 is read times ``k_scale`` or ``v_scale``; SGLang divided by it when writing.  Arguments are
those of ``srt/layers/attention/intel_amx_backend.py``, whose window counts the token itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Weighting:
    """How scores become weights: ``softmax(cap * tanh(scale * q·k / cap))``, sinks in the denominator."""

    scale: float
    cap: float
    sinks: Tensor | None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
        """Attention of one request.

        Args:
            q: ``[n, H, D]``.
            k: ``[m, KH, D]``.
            v: ``[m, KH, V]``.
            mask: ``[n, m]``, true where a query sees a key; None for everywhere, or for ``causal``.
            causal: query i sees keys 0 … i; n == m.

        Returns:
            ``[n, H, V]`` in q's dtype.
        """
        n, heads, _ = q.shape
        k, v = k.to(q.dtype).transpose(0, 1), v.to(q.dtype).transpose(0, 1)
        group = heads // k.shape[0]
        plain = self.cap <= 0 and self.sinks is None
        if causal and plain:
            k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            q = q.transpose(0, 1)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=self.scale)
            return out[0].transpose(0, 1)
        if causal:
            mask = torch.ones(n, n, dtype=torch.bool).tril()
        # The queries that share a key head are rows of one matrix, so that no key is copied for them.
        rows = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3).flatten(1, 2)
        if mask is not None:
            mask = mask.repeat(group, 1)
        if plain:
            out = F.scaled_dot_product_attention(rows[None], k[None], v[None], mask, scale=self.scale)[0]
        else:
            out = self._weights(rows.float() @ k.float().transpose(1, 2), mask, n) @ v.float()
        return out.unflatten(1, (group, n)).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)

    def _weights(self, scores: Tensor, mask: Tensor | None, n: int) -> Tensor:
        scores = scores * self.scale
        if self.cap > 0:
            scores = self.cap * torch.tanh(scores / self.cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(len(scores), -1, 1).repeat_interleave(n, 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def _cached(buffer: Tensor, slots: Tensor, scale: float) -> Tensor:
    rows = buffer.index_select(0, slots)  # ten times as fast as buffer[slots]
    return rows if rows.dtype.itemsize > 1 else rows.float() * scale


def decode_attention_cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: float,
    v_scale: float,
    output: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Store one new key and value per request, then attend with one query per request.

    Args:
        query: ``[b, H, D]``.
        k_cache: written, ``[slots, KH, D]``.
        v_cache: written, ``[slots, KH, V]``; of `k_cache`'s memory with MLA.
        k_scale: of a float8 cache.
        v_scale: of a float8 cache.
        output: written, ``[b, H, V]``.
        key: ``[b, KH, D]`` in any shape; None where the cache holds it already.
        value: ``[b, KH, V]``, likewise.
        loc: ``[b]``, the new tokens' slots.
        attn_logits: scratch memory of the real kernel, unused.
        req_to_token: ``[pool, positions]``.
        req_pool_indices: ``[b]``.
        seq_lens: ``[b]``, tokens to attend to, the new one included.
        sm_scale: on scores.
        logit_cap: soft cap on scores; 0 for none.
        is_cross_attn: attend to the encoder's tokens alone.
        sliding_window_size: latest tokens to attend to; 0 for all.
        encoder_lens: ``[b]``, encoder tokens, which come first in a request's row.
        sinks: ``[H]``, logits that take weight and give nothing.
    """
    if key is not None and value is not None:
        k_cache[loc.long()] = key.reshape(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        if v_cache.data_ptr() != k_cache.data_ptr():
            v_cache[loc.long()] = value.reshape(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    weighting = _Weighting(sm_scale, logit_cap, sinks)
    encoder = [0] * len(seq_lens) if encoder_lens is None else encoder_lens.tolist()
    for i, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        begin, end = encoder[i], encoder[i] + length
        if is_cross_attn:
            begin, end = 0, encoder[i]
        elif sliding_window_size > 0:
            begin = max(begin, end - sliding_window_size)
        slots = req_to_token[row, begin:end].long()
        k, v = _cached(k_cache, slots, k_scale), _cached(v_cache, slots, v_scale)
        output[i : i + 1] = weighting.attend(query[i : i + 1], k, v, None)


def extend_attention_cpu(
    q_extend: Tensor,
    k_extend: Tensor | None,
    v_extend: Tensor | None,
    o_extend: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool = False,
    sliding_window_size: int = 0,
    encoder_lens: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Attend with the last ``extend_seq_lens[i]`` tokens of each request, to these and those before.

    The cache already holds them all; the new ones are taken from ``k_extend`` and ``v_extend``, where given.
    As in SGLang's Triton kernel (``kernels/ops/attention/extend_attention.py``) a window counts the rows of
    a tree, not depths.

    Args:
        q_extend: ``[N, H, D]``, the requests' new tokens at ``extend_start_loc``.
        k_extend: ``[N, KH, D]``, or ``[N, H, D]`` for MLA uncompressed; None to read the cache.
        v_extend: ``[N, KH, V]``, likewise.
        o_extend: written, ``[N, H, V]``.
        k_buffer: ``[slots, KH, D]``.
        v_buffer: ``[slots, KH, V]``.
        k_scale: of a float8 cache.
        v_scale: of a float8 cache.
        req_to_token: ``[pool, positions]``.
        req_pool_indices: ``[b]``.
        seq_lens: ``[b]``, all tokens, the new ones included.
        extend_seq_lens: ``[b]``, new tokens.
        extend_start_loc: ``[b]``, where they begin in ``q_extend``.
        max_len_extend: the largest of ``extend_seq_lens``, unused.
        sm_scale: on scores.
        logit_cap: soft cap on scores; 0 for none.
        is_cross_attn: attend to the encoder's tokens alone.
        sliding_window_size: latest tokens a causal query attends to, itself included; 0 for all.
        encoder_lens: ``[b]``, encoder tokens, which come first in a request's row.
        sinks: ``[H]``, logits that take weight and give nothing.
        tree_mask: one ``[n, n]`` after another (``QLEN_ONLY``): which new tokens a new token attends to, in
            place of ``is_causal``; it attends to all before.
        is_causal: new tokens do not attend to later ones.

    Raises:
        ValueError: for a mask of another size, or a prefix in a cache of another shape than ``k_extend``.
    """
    lengths, news = seq_lens.tolist(), extend_seq_lens.tolist()
    weighting = _Weighting(sm_scale, logit_cap, sinks)
    encoder = [0] * len(lengths) if encoder_lens is None else encoder_lens.tolist()
    trees: list[Tensor | None] = [None] * len(lengths)
    if tree_mask is not None:
        trees = _trees(tree_mask, news)
    requests = zip(req_pool_indices.tolist(), extend_start_loc.tolist(), strict=True)
    for i, (row, start) in enumerate(requests):
        length, new = lengths[i], news[i]
        if new == 0:
            continue
        now, before = slice(start, start + new), length - new
        given = None
        if k_extend is not None and v_extend is not None and not is_cross_attn:
            given = (k_extend[now], v_extend[now])
        windowed = 0 < sliding_window_size < length and is_causal and not is_cross_attn
        # What no new token sees may be gone from the cache.
        skipped = max(0, before - sliding_window_size + 1) if windowed else 0
        before -= skipped
        begin, end = encoder[i] + skipped, encoder[i] + length - (0 if given is None else new)
        if is_cross_attn:
            begin, end = 0, encoder[i]
        if given is not None and not before:
            k, v = _heads(given[0], q_extend.shape[-1]), _heads(given[1], o_extend.shape[-1])
        else:
            slots = req_to_token[row, begin:end].long()
            k, v = _cached(k_buffer, slots, k_scale), _cached(v_buffer, slots, v_scale)
            if given is not None:
                k, v = _after(k, given[0], "k"), _after(v, given[1], "v")
        tree = trees[i]
        if is_cross_attn or (tree is None and not is_causal):
            o_extend[now] = weighting.attend(q_extend[now], k, v, None)
        elif tree is None and not before and not windowed:
            o_extend[now] = weighting.attend(q_extend[now], k, v, None, causal=True)
        else:
            mask = _visible(before, new, tree, sliding_window_size if windowed else 0)
            o_extend[now] = weighting.attend(q_extend[now], k, v, mask)


def _trees(tree_mask: Tensor, news: list[int]) -> list[Tensor | None]:
    sizes = [new * new for new in news]
    if tree_mask.numel() != sum(sizes):
        raise ValueError(
            f"tree_mask has {tree_mask.numel()} entries; requests of {news} new tokens need one square each "
            f"(QLEN_ONLY), {sum(sizes)} in all"
        )
    return [part.view(new, new).bool() for part, new in zip(tree_mask.split(sizes), news, strict=True)]


def _heads(given: Tensor, width: int) -> Tensor:
    """``[n, heads, width]`` of keys or values given in any shape."""
    return given.reshape(len(given), -1, width)


def _after(cached: Tensor, given: Tensor, name: str) -> Tensor:
    """Keys or values of the prefix, followed by those of the new tokens."""
    if given[0].numel() != cached[0].numel():
        raise ValueError(
            f"{name}_extend has shape {list(given.shape)} after a prefix of {len(cached)} tokens whose cache "
            f"rows are {list(cached.shape[1:])}; uncompressed MLA keys and values go without a prefix"
        )
    return torch.cat((cached.to(given.dtype), given.reshape(-1, *cached.shape[1:])))


def _visible(before: int, new: int, tree: Tensor | None, window: int) -> Tensor:
    """Mask ``[new, before + new]`` of what each new token sees: earlier tokens, or those of its tree."""
    keys = torch.arange(before + new)
    own = keys[before:].unsqueeze(1)
    mask = keys <= own if tree is None else F.pad(tree, (before, 0), value=True)
    return mask & (keys > own - window) if window else mask
