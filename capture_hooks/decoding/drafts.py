"""Drafting: a head proposes a chain, or a dynamic tree, of tokens after the last committed one.

A draft is a small tree whose root is the last committed token, not yet seen by the target; a chain
is the tree in which every node has one child.  The dynamic tree is that of EAGLE-2 (arXiv
2406.16858): expand the ``branch`` most probable leaves level by level, then keep the ``size`` nodes
of highest cumulative draft probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import DecodingError
from ..heads.contract import DraftHead


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of a dynamic draft tree.

    Attributes:
        depth: longest path drafted, in tokens (head steps per round: ``depth - 1``).
        branch: leaves expanded per level, and children drafted per leaf.
        size: drafted tokens kept for verification.
    """

    depth: int = 5
    branch: int = 4
    size: int = 15

    def __post_init__(self) -> None:
        for name in ("depth", "branch", "size"):
            if getattr(self, name) < 1:
                raise DecodingError(f"tree {name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafted tokens in an order where parents come before children.

    Node 0 is the root (the last committed token); node i > 0 holds ``tokens[i - 1]``.

    Attributes:
        tokens: target-vocabulary ids of nodes 1..M.
        parents: their parents as node numbers (``parents[i - 1] < i``).
        proposals: the distribution [M, D] each token was *sampled* from, over the draft vocabulary;
            None where tokens were picked deterministically (a point mass).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    proposals: Tensor | None = None

    @property
    def is_chain(self) -> bool:
        return all(parent == at for at, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Depth of nodes 0..M; the root's is 0."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def visibility(self) -> Tensor:
        """[M+1, M+1] bool: which nodes lie on each node's path from the root, itself included."""
        seen = torch.eye(len(self.tokens) + 1, dtype=torch.bool)
        for node, parent in enumerate(self.parents, start=1):
            seen[node] |= seen[parent]
        return seen

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node`` (empty for the root)."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self.parents[node - 1]
        return nodes[::-1]


class Warp(Protocol):
    """Turns draft logits [M, D] into the distribution to sample from."""

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class HeadState:
    """Where drafting starts: the head's cache, its last hidden row and that row's position."""

    cache: Any
    hidden: Tensor  # [1, H]
    position: int


def draft_chain(
    head: DraftHead,
    state: HeadState,
    length: int,
    min_confidence: float = 0.0,
    warp: Warp | None = None,
    generator: torch.Generator | None = None,
) -> Draft:
    """Draft up to ``length`` tokens one after another.

    Drafting stops before a token whose cumulative draft probability (the chance, as the head sees
    it, that the target accepts the chain so far) falls below ``min_confidence``.  With ``warp`` tokens
    are sampled from ``warp(logits)``; the decision to stop then looks at the distribution only, never at
    the token drawn from it, as it must for the rejection rule to stay exact.
    """
    tokens: list[Tensor] = []
    proposals: list[Tensor] = []
    hidden, confidence = state.hidden, 1.0
    for at in range(length):
        logits = head.logits(hidden)
        if warp is None:
            index = logits.argmax(-1)
            if min_confidence > 0:
                top = logits[0, index[0]].float() - torch.logsumexp(logits[0].float(), 0)
                confidence *= math.exp(top.item())
                if confidence < min_confidence:
                    break
        else:
            q = warp(logits.float())
            if min_confidence > 0 and confidence * q.max().item() < min_confidence:
                break
            index = torch.multinomial(q[0], 1, generator=generator)
            confidence *= q[0, index[0]].item() if min_confidence > 0 else 1.0
            proposals.append(q)
        token = head.target_ids(index)
        tokens.append(token)
        if at + 1 < length:
            position = torch.tensor([state.position + 1 + at], device=hidden.device)
            hidden = head.step(state.cache, hidden, token, position)
    ids = torch.cat(tokens).tolist() if tokens else []
    return Draft(tuple(ids), tuple(range(len(ids))), torch.cat(proposals) if proposals else None)


def draft_tree(
    head: DraftHead, state: HeadState, shape: TreeShape, depth: int, min_confidence: float = 0.0
) -> Draft:
    """Draft a dynamic tree no deeper than ``depth`` (deterministic: every child is a point mass).

    Nodes of cumulative probability below ``min_confidence`` are not drafted.
    """
    # One entry per drafted node, in drafting order; `parent` is an entry number, -1 for the root.
    scores: list[float] = []
    tokens: list[int] = []
    parents: list[int] = []
    base = state.position + 1  # rows the head's cache holds before drafting
    rows: dict[int, int] = {}  # entry -> its row among those appended
    frontier, hidden = [-1], state.hidden
    floor = math.log(min_confidence) if min_confidence > 0 else -math.inf
    for level in range(min(depth, shape.depth)):
        logp = head.logits(hidden).float().log_softmax(-1)
        best = logp.topk(min(shape.branch, logp.shape[-1]), -1)
        ids = head.target_ids(best.indices).tolist()
        fresh: list[int] = []
        source: dict[int, int] = {}
        for at, parent in enumerate(frontier):
            above = scores[parent] if parent >= 0 else 0.0
            for token, value in zip(ids[at], best.values[at].tolist(), strict=True):
                if above + value < floor:
                    continue
                source[len(tokens)] = at
                fresh.append(len(tokens))
                tokens.append(token)
                parents.append(parent)
                scores.append(above + value)
        frontier = sorted(fresh, key=lambda entry: -scores[entry])[: shape.branch]
        if not frontier or level + 1 == min(depth, shape.depth):
            break
        mask = torch.zeros(len(frontier), base + len(rows) + len(frontier), dtype=torch.bool)
        mask[:, :base] = True
        for at, entry in enumerate(frontier):
            rows[entry] = len(rows)
            node = entry
            while node >= 0:
                mask[at, base + rows[node]] = True
                node = parents[node]
        device = hidden.device
        hidden = head.step(
            state.cache,
            hidden[torch.tensor([source[entry] for entry in frontier], device=device)],
            torch.tensor([tokens[entry] for entry in frontier], device=device),
            torch.full((len(frontier),), base + level, device=device),
            mask.to(device),
        )
    # A child's score is never above its parent's and it was drafted later, so the best ones are connected.
    kept = sorted(sorted(range(len(tokens)), key=lambda entry: -scores[entry])[: shape.size])
    node_of = {-1: 0} | {entry: at for at, entry in enumerate(kept, start=1)}
    return Draft(tuple(tokens[e] for e in kept), tuple(node_of[parents[e]] for e in kept))
