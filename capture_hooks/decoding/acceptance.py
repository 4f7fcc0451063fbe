"""Which drafted tokens the target accepts.

Deterministic drafts need no rejection test: at every node draw the token the target would emit
(arg-max, or one sample of its distribution) and go on while it is among the drafted children.  For a
point-mass draft this is the same law as accepting x with probability p(x) and else sampling from
p without x (arXiv 2211.17192 with q a point mass; several children: arXiv 2305.09781).
Sampled drafts follow the rejection rule of arXiv 2211.17192 with the full proposal distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..heads.drafting import Proposal


def walk(proposal: Proposal, choices: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's choices through a deterministic draft.

    Args:
        proposal: the drafted tree.
        choices: the target's token after each of nodes 0..M.

    Returns:
        Accepted nodes from the root down, and the token the target adds after them.
    """
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True), start=1)
    }
    accepted: list[int] = []
    node = 0
    while (child := children.get((node, choices[node]))) is not None:
        accepted.append(child)
        node = child
    return accepted, choices[node]


def reject(
    proposal: Proposal, target: Tensor, draft_ids: Tensor, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """The rejection rule for a sampled chain.

    Args:
        proposal: a chain with ``probabilities`` [M, D].
        target: the target's distributions [M+1, V] after nodes 0..M.
        draft_ids: [D] target ids of the draft vocabulary.
        generator: source of randomness.

    Returns:
        As `walk`.
    """
    assert proposal.probabilities is not None
    drawn_from = proposal.probabilities.to(target)
    uniform = torch.rand(len(proposal.tokens), generator=generator, device=target.device)
    for at, token in enumerate(proposal.tokens):
        # q is laid out over the full vocabulary: outside the draft vocabulary it is zero.
        q = torch.zeros_like(target[at]).index_copy_(0, draft_ids, drawn_from[at])
        p = target[at]
        if uniform[at] * q[token] < p[token]:
            continue
        residual = (p - q).clamp_(min=0)
        total = residual.sum()
        # Only rounding can leave nothing: p == q everywhere, where a rejection has probability zero.
        weights = residual if total > 0 else p
        return list(range(1, at + 1)), int(torch.multinomial(weights, 1, generator=generator).item())
    bonus = torch.multinomial(target[len(proposal.tokens)], 1, generator=generator)
    return list(range(1, len(proposal.tokens) + 1)), int(bonus.item())
