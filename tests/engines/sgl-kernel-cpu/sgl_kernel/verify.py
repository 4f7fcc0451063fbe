"""Greedy verification: the longest path of a draft tree that the target would have taken itself."""

from __future__ import annotations

import torch
from torch import Tensor


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk each request's tree from the root, to the child that holds the target's token, while there is one.

    Meaning: ``kernels/jit/include/sgl_kernel/speculative/eagle.cuh``, ``VerifyTreeGreedy``.  What is not
    written keeps the caller's fill: SGLang gives -1 for ``accept_index``, 0 for ``predicts``.

    Args:
        predicts: written, ``[b * n]``: the target's token at each accepted node; the last one is the bonus.
        accept_index: written, ``[b, s]``: accepted nodes by ``retrive_index``, the root first; s bounds them.
        accept_token_num: written, ``[b]``: accepted drafts, so without the root.
        candidates: ``[b, n]``, the nodes' tokens.
        retrive_index: ``[b, n]``, the nodes' index in the batch.
        retrive_next_token: ``[b, n]``, first child or -1.
        retrive_next_sibling: ``[b, n]``, or -1.
        target_predict: ``[b, n]``, the target's greedy token after each node.
    """
    limit = accept_index.shape[1]
    chosen = target_predict.flatten().tolist()
    trees = zip(
        candidates.tolist(),
        retrive_index.tolist(),
        retrive_next_token.tolist(),
        retrive_next_sibling.tolist(),
        strict=True,
    )
    for request, (tokens, index, child, sibling) in enumerate(trees):
        path, node = [index[0]], 0
        while len(path) < limit:
            node = child[node]
            while node != -1 and tokens[node] != chosen[path[-1]]:
                node = sibling[node]
            if node == -1:
                break
            path.append(index[node])
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        predicts[path] = torch.tensor([chosen[node] for node in path], dtype=predicts.dtype)
