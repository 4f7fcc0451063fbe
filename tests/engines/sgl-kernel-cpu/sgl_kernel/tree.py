"""Draft trees: from EAGLE's candidates, or from a mask, to links, positions and attention masks.

A request's tree has n nodes; node 0, the root, is the token the target itself gave last.  A node's
*first child* and *next sibling* are the smallest larger node of that kind, or -1.  Indices written to
``retrive_index`` run over the whole batch: node i of request b is ``b * n + i``.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Layouts of the mask: ``TreeMaskMode`` of ``kernels/ops/speculative/spec_tree.py``, SGLang 0.5.23.
FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Lay out the selected candidates of every request as a tree.

    Meaning: ``kernels/jit/include/sgl_kernel/speculative/eagle.cuh``, ``build_tree_efficient``.  Candidate c
    was drafted under the ``c // topk``-th parent; the 0th is the root, the others name their own candidate
    in ``parent_list``.  A node whose parent was not selected is left without links.

    Args:
        parent_list: ``[b, topk * (depth - 1) + 1]``; narrower where all candidates hang on the root.
        selected_index: ``[b, n - 1]``, candidates that became nodes 1 … n-1, ascending.
        verified_seq_len: ``[b]``, committed tokens L.
        tree_mask: written: who attends to whom.  ``FULL_MASK``: per request ``[n, L + n]``, of which the
            first L columns are left alone.  ``QLEN_ONLY``: ``[b, n, n]``.  ``QLEN_ONLY_BITPACKING``: one
            integer per node, bit j for node j, as wide as n needs (8, 16 or 32 bits).
        positions: written, ``[b * n]``: L plus the node's depth.
        retrive_index: written, ``[b, n]``.
        retrive_next_token: written, ``[b, n]``: first child.
        retrive_next_sibling: written, ``[b, n]``.
        topk: candidates drafted per parent.
        depth: steps drafted, so the longest path from the root.
        draft_token_num: n.
        tree_mask_mode: layout of ``tree_mask``.

    Raises:
        ValueError: for a layout there is not, or more nodes than bits.
    """
    requests, n = len(verified_seq_len), draft_token_num
    parents = _parents(parent_list, selected_index, topk)
    mask, depths = _ancestors(parents, depth)
    _write_links(parents, retrive_next_token, retrive_next_sibling)
    retrive_index.copy_(torch.arange(requests * n).view(requests, n))
    positions.copy_((verified_seq_len.unsqueeze(1) + depths).flatten())
    if tree_mask_mode == FULL_MASK:
        _write_full(mask, verified_seq_len.tolist(), tree_mask)
    elif tree_mask_mode == QLEN_ONLY:
        tree_mask[: mask.numel()] = mask.flatten().to(tree_mask.dtype)
    elif tree_mask_mode == QLEN_ONLY_BITPACKING:
        _write_bits(mask, tree_mask)
    else:
        raise ValueError(f"tree_mask_mode {tree_mask_mode} is none of SGLang's: 0, 1 or 2")


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Links and positions of the trees that a ``QLEN_ONLY`` mask describes; arguments as above.

    Meaning: ``kernels/ops/speculative/reconstruct_tree.py``.  A node's parent is the largest smaller node
    it attends to.
    """
    n = draft_token_num
    ancestors = tree_mask[: batch_size * n * n].view(batch_size, n, n).bool().tril(-1)
    node = torch.arange(n)
    parents = torch.where(ancestors, node, -1).amax(2)
    # A first child by the mask is any smallest descendant, and that is a child.
    _write_links(parents, retrive_next_token, retrive_next_sibling)
    retrive_index.copy_(torch.arange(batch_size * n).view_as(retrive_index))
    positions.copy_((verified_seq_len[:batch_size].unsqueeze(1) + ancestors.sum(2)).flatten())


def _parents(parent_list: Tensor, selected: Tensor, topk: int) -> Tensor:
    """Parent of every node, ``[b, n]``: -1 for the root and for nodes whose parent was not selected."""
    group = selected.long() // topk
    found = torch.zeros_like(group)
    if parent_list.shape[1] and group.shape[1]:  # else all hang on the root
        parent = parent_list.long().gather(1, group)
        named = selected.unsqueeze(1) == parent.unsqueeze(2)
        found = torch.where(named.any(2), named.int().argmax(2) + 1, -1)
        found = torch.where(group == 0, 0, found)
    return torch.cat((torch.full((len(found), 1), -1), found), 1)


def _ancestors(parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Mask ``[b, n, n]`` of root, node and all between, and each node's depth ``[b, n]``."""
    requests, n = parents.shape
    mask = torch.eye(n, dtype=torch.bool).repeat(requests, 1, 1)
    mask[:, :, 0] = True
    depths = torch.zeros_like(parents)
    up = parents.clamp(min=0)
    at = torch.arange(n).repeat(requests, 1)
    for _ in range(depth):
        depths += at > 0
        at = up.gather(1, at)
        mask.scatter_(2, at.unsqueeze(2), True)
    return mask, depths


def _write_links(parents: Tensor, first_child: Tensor, next_sibling: Tensor) -> None:
    """Fill both ``[b, n]`` tensors from ``parents``."""
    node = torch.arange(parents.shape[1])
    child = parents.unsqueeze(1) == node.unsqueeze(1)  # [b, parent, child]
    later = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (node > node.unsqueeze(1))
    later &= (parents >= 0).unsqueeze(2)
    for links, candidates in ((first_child, child), (next_sibling, later)):
        links.copy_(torch.where(candidates.any(2), candidates.int().argmax(2), -1).view_as(links))


def _write_full(mask: Tensor, lengths: list[int], out: Tensor) -> None:
    n, begin = mask.shape[1], 0
    for tree, length in zip(mask, lengths, strict=True):
        end = begin + n * (length + n)
        out[begin:end].view(n, length + n)[:, length:] = tree.to(out.dtype)
        begin = end


def _write_bits(mask: Tensor, out: Tensor) -> None:
    requests, n, _ = mask.shape
    if n > 32:
        raise ValueError(f"a packed tree mask has 32 bits at most, not the {n} that {n} draft tokens need")
    width = 1 if n <= 8 else 2 if n <= 16 else 4
    bits = torch.nn.functional.pad(mask, (0, 8 * width - n)).view(requests * n, width, 8)
    packed = (bits << torch.arange(8)).sum(2).to(torch.uint8)
    out.view(torch.uint8)[: packed.numel()] = packed.flatten()
