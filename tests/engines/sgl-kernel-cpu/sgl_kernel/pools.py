"""Which slot of the KV cache each token of each request has, and moving rows between slots.

``req_to_token[r, p]`` is the slot of position p of the request in row r of the pool.  Integer tensors
come in int32 and int64 alike, as SGLang 0.5.23 passes them; results take the dtype of their destination.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def _ranges(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every cell of ``[rows[i], start[i]:end[i]]``, request after request."""
    start, lengths = start.long(), (end - start).long()
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    columns = torch.arange(total) + torch.repeat_interleave(start - before, lengths, output_size=total)
    return torch.repeat_interleave(rows.long(), lengths, output_size=total), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write new slots: ``req_to_token[req_pool_indices[i], start[i]:end[i]]`` from ``out_cache_loc``.

    Meaning: ``srt/mem_cache/allocation.py``, ``assign_req_to_token_pool``.
    """
    cells = _ranges(req_pool_indices, start_offset, end_offset)
    req_to_token[cells] = out_cache_loc[: len(cells[0])].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read slots: the inverse of `assign_req_to_token_pool_cpu`, packed into the front of ``out_cache_loc``.

    Meaning: ``kernels/ops/speculative/cache_locs.py``, ``assign_extend_cache_locs``.
    """
    cells = _ranges(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: len(cells[0])] = req_to_token[cells].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots that follow each request's committed tokens.

    Meaning: ``kernels/ops/speculative/cache_locs.py``, ``assign_draft_cache_locs_contiguous``.
    """
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """One row of slots for every drafted branch: the committed tokens, then the branch's own steps.

    Branch t of a request of length L has its steps at columns ``L + t * num_steps`` of the request's row,
    as `assign_draft_cache_locs_contiguous_cpu` lays them out; here they follow the committed tokens.

    Returns:
        ``[requests * topk, pool_len]``, dtype of ``req_to_token``; defined up to ``L + num_steps``.
    """
    source = req_to_token[req_pool_indices.long()].repeat_interleave(topk, 0)
    lengths = seq_lens.long().repeat_interleave(topk).unsqueeze(1)
    branch = torch.arange(topk).repeat(len(seq_lens)).unsqueeze(1)
    steps = torch.arange(num_steps)
    own = source.gather(1, lengths + branch * num_steps + steps)
    return source.scatter(1, lengths + steps, own)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy rows ``src_loc`` of every buffer to ``tgt_loc``, all reads before any write.

    Meaning: ``kernels/ops/kvcache/cache_move.py``, ``copy_all_layer_kv_cache_tiled``.

    Args:
        data_ptrs: address of each buffer.
        strides: bytes of one row of each buffer.
        tgt_loc: rows to overwrite.
        src_loc: rows to read, as many.
    """
    if not len(tgt_loc):
        return
    target, source = tgt_loc.long(), src_loc.long()
    rows = int(torch.maximum(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Each request's last accepted token: ``accept_tokens`` is ``accept_stride`` wide per request.

    Meaning: ``kernels/ops/speculative/eagle.py``, ``fill_bonus_tokens``.
    """
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Pack the slots of accepted tokens to the front; -1 in ``accept_index`` is no token.

    Meaning: ``kernels/ops/speculative/eagle.py``, ``fill_accept_out_cache_loc``.
    """
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: len(slots)] = slots.to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and write its new token at the end, or at ``select_index``.

    Meaning: ``kernels/ops/speculative/multi_layer_eagle.py``, ``rotate_input_ids_kernel``.
    """
    starts, lengths = extend_start_loc.tolist(), extend_seq_lens.tolist()
    new_tokens = topk_index.flatten()
    for request, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        last = start + length - 1 if select_index is None else int(select_index[request])
        input_ids[last] = new_tokens[request]
