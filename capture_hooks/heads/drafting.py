"""How a head drafts: what it is asked for, what it proposes, and proposals of heads that go step by step.

The decoder tells a head's `Drafter` which states and tokens were committed, and asks it for a *proposal*:
tokens that may follow the last committed one, with the distributions they were drawn from where it samples.
It knows nothing else about the head.  What three kinds of heads do with that:

* **Step by step** (EAGLE-3, arXiv 2503.01840).  Row t is made of the captured states at token x[t] and of
  the token x[t+1]; each drafted row of its parent's output and the drafted token.  `StepwiseDrafter` makes
  chains and trees of it.
* **Blocks** (DFlash, arXiv 2602.06036).  `accept` turns every committed row of states into keys and values
  of all draft layers.  `propose` runs [anchor, mask, mask, ...] against them in one pass.  The anchor is the
  last token accepted; its position is the number of rows accepted, and slot j >= 1 gives the j-th proposed
  token.  A block longer than the depth asked for is cut; nothing of it stays in the cache.  The
  distributions are independent: none depends on a token drawn before it, which the rejection rule allows.
  DSpark adds to each slot a bias by the token chosen before it: `Chain` takes the slots one by one.
* **Several tokens at once** (P-EAGLE, arXiv 2602.01469).  The first row is EAGLE's; the others are made of
  one learnt state and a mask token in the same pass, and are dropped at the next `accept`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ..errors import DecodingError

#: A draft is verified in one pass of the target: no useful tree has more nodes.
_LARGEST: Final = 2**16


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of a dynamic draft tree.

    Attributes:
        depth: longest path drafted, in tokens (``depth - 1`` steps of a head that goes step by step).
        branch: leaves expanded per level, and children drafted per leaf.
        size: drafted tokens kept for verification.
    """

    depth: int = 5
    branch: int = 4
    size: int = 15

    def __post_init__(self) -> None:
        for name in ("depth", "branch", "size"):
            if not 1 <= getattr(self, name) <= _LARGEST:
                raise DecodingError(f"tree {name} must be from 1 to {_LARGEST}, not {getattr(self, name)}")


class Warp(Protocol):
    """Turns draft logits [M, D] into the distributions to sample from."""

    def __call__(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Drafting:
    """How one sequence is drafted, from its first proposal to its last.

    Attributes:
        depth: most tokens on a path.
        tree: bounds of a dynamic tree; None for a chain.  A head that makes no trees proposes chains.
        min_confidence: stop before a token where the head itself gives the draft up to it less than this
            chance of acceptance.
        warp: sample tokens from ``warp(logits)`` and hand over these distributions; None to take the most
            probable ones.  Always None for a tree.
        generator: source of randomness.
    """

    depth: int
    tree: TreeShape | None = None
    min_confidence: float = 0.0
    warp: Warp | None = None
    generator: torch.Generator | None = None

    @property
    def size(self) -> int:
        """Most tokens of a proposal."""
        return self.depth if self.tree is None else self.tree.size


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens in an order where parents come before children: a chain is a tree without branches.

    Node 0 is the root (the last committed token, which the target has not read yet); node i > 0 holds
    ``tokens[i - 1]``.

    Attributes:
        tokens: target-vocabulary ids of nodes 1..M.
        parents: their parents as node numbers (``parents[i - 1] < i``).
        probabilities: [M, D] the distribution over the draft vocabulary that each token of a chain was
            *sampled* from.  It may depend on the tokens before, and so may the choice to draft that token at
            all; neither may depend on the token itself or on those after it.  None where tokens were picked
            deterministically (a point mass).
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: Tensor | None = None

    @classmethod
    def chain(cls, tokens: list[int], probabilities: Tensor | None = None) -> Proposal:
        """Tokens one after another."""
        return cls(tuple(tokens), tuple(range(len(tokens))), probabilities)

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


class Drafter(Protocol):
    """A head drafting one sequence.  Called in inference mode, all tensors on the head's device."""

    def accept(self, states: Tensor, next_ids: Tensor) -> None:
        """Take in the rows committed since the last call, in order, from token 0 on without a gap.

        What the drafter kept of its last proposal is void: the accepted part of it is among these rows.

        Args:
            states: [T, K*H] captured inputs of T committed tokens that the target has read.
            next_ids: [T] int64 the token after each; the last is committed, but not yet read by the target.
        """
        ...

    def propose(self, depth: int) -> Proposal:
        """Draft behind the last token accepted.  A call of `accept` comes before every call.

        Args:
            depth: most tokens on a path now, at least 1 and at most `Drafting.depth`.

        Returns:
            As many tokens as the head likes within `Drafting`; none is a proposal too.
        """
        ...


class Chain:
    """A chain under way: turns the logits of its next place into a token, as `Drafting` asks.

    Args:
        drafting: how.
        vocabulary: [D] target ids of the draft vocabulary.
    """

    def __init__(self, drafting: Drafting, vocabulary: Tensor) -> None:
        self._drafting, self._vocabulary = drafting, vocabulary
        self._confidence = 1.0
        self._tokens: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def add(self, logits: Tensor) -> Tensor | None:
        """The next token [1], a target id, drafted from logits [1, D]; None where the chain ends before it.

        The chance of acceptance that decides this is the product of the drafted tokens' probabilities; where
        tokens are sampled it counts the next place's most probable one, whichever will be drawn.
        """
        least, warp = self._drafting.min_confidence, self._drafting.warp
        if warp is None:
            index = logits.argmax(-1)
            if least > 0:
                top = logits[0, index[0]].float() - torch.logsumexp(logits[0].float(), 0)
                self._confidence *= math.exp(top.item())
                if self._confidence < least:
                    return None
        else:
            q = warp(logits.float())
            if least > 0 and self._confidence * q.max().item() < least:
                return None
            index = torch.multinomial(q[0], 1, generator=self._drafting.generator)
            self._confidence *= q[0, index[0]].item() if least > 0 else 1.0
            self._probabilities.append(q)
        token = self._vocabulary[index]
        self._tokens.append(token)
        return token

    def proposal(self) -> Proposal:
        """The tokens added so far."""
        ids = torch.cat(self._tokens).tolist() if self._tokens else []
        return Proposal.chain(ids, torch.cat(self._probabilities) if self._probabilities else None)


class StepwiseHead(Protocol):
    """A head that drafts one token after another, each from a row of its own KV cache."""

    @property
    def draft_token_ids(self) -> Tensor:
        """[D] int64 ascending: the target ids the head can draft."""
        ...

    def new_cache(self, max_length: int) -> Any:
        """An empty KV cache for up to ``max_length`` rows of one sequence."""
        ...

    def extend(self, cache: Any, states: Tensor, next_ids: Tensor, start: int) -> Tensor:
        """Append rows start..start+T-1 made from captured states [T, K*H] and tokens x[t+1] [T].

        Anything the cache held at or after ``start`` (drafted rows) is dropped first.
        Returns hidden [T, H].
        """
        ...

    def step(
        self, cache: Any, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Append M drafted rows: hidden [M, H] of their parents, their tokens [M], row positions [M].

        ``mask`` [M, cached + M] bool says which rows each sees; None means all before it.
        Returns hidden [M, H].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., D]."""
        ...


class StepwiseDrafter:
    """Chains, and the dynamic trees of EAGLE-2 (arXiv 2406.16858), from a head that goes step by step.

    A tree grows level by level from its ``branch`` most probable leaves; then the ``size`` nodes of highest
    cumulative draft probability are kept.

    Args:
        head: the head.
        max_length: most tokens of the sequence, drafted ones included.
        drafting: how to draft.
    """

    def __init__(self, head: StepwiseHead, max_length: int, drafting: Drafting) -> None:
        self._head, self._drafting = head, drafting
        shape = drafting.tree
        # A draft is never longer than the answer; of a level no more than `size` nodes are ever kept.
        deepest = min(drafting.depth, max_length)
        rows = deepest if shape is None else deepest * min(shape.branch, shape.size)
        self._cache = head.new_cache(max_length + rows)
        self._length = 0
        self._hidden: Tensor | None = None  # [1, H] of the last accepted row

    def accept(self, states: Tensor, next_ids: Tensor) -> None:
        """Append the committed rows to the head's cache; see `Drafter.accept`."""
        self._hidden = self._head.extend(self._cache, states, next_ids, self._length)[-1:]
        self._length += len(next_ids)

    def propose(self, depth: int) -> Proposal:
        """Draft a chain or a tree behind the last committed row; see `Drafter.propose`."""
        assert self._hidden is not None
        if self._drafting.tree is None:
            return self._chain(self._hidden, depth)
        return self._tree(self._hidden, self._drafting.tree, min(depth, self._drafting.tree.depth))

    def _chain(self, hidden: Tensor, depth: int) -> Proposal:
        chain = Chain(self._drafting, self._head.draft_token_ids)
        for at in range(depth):
            token = chain.add(self._head.logits(hidden))
            if token is None:
                break
            if at + 1 < depth:
                position = torch.tensor([self._length + at], device=hidden.device)
                hidden = self._head.step(self._cache, hidden, token, position)
        return chain.proposal()

    def _tree(self, hidden: Tensor, shape: TreeShape, depth: int) -> Proposal:
        """Deterministic: every child is a point mass."""
        # One entry per drafted node, in drafting order; `parent` is an entry number, -1 for the root.
        scores: list[float] = []
        tokens: list[int] = []
        parents: list[int] = []
        base = self._length  # rows in the cache before drafting
        rows: dict[int, int] = {}  # entry -> its row among those appended
        frontier = [-1]
        least = self._drafting.min_confidence
        floor = math.log(least) if least > 0 else -math.inf
        for level in range(depth):
            logp = self._head.logits(hidden).float().log_softmax(-1)
            best = logp.topk(min(shape.branch, logp.shape[-1]), -1)
            ids = self._head.draft_token_ids[best.indices].tolist()
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
            frontier = sorted(fresh, key=lambda entry: -scores[entry])[: min(shape.branch, shape.size)]
            if not frontier or level + 1 == depth:
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
            hidden = self._head.step(
                self._cache,
                hidden[torch.tensor([source[entry] for entry in frontier], device=device)],
                torch.tensor([tokens[entry] for entry in frontier], device=device),
                torch.full((len(frontier),), base + level, device=device),
                mask.to(device),
            )
        # A child's score is never above its parent's and it was drafted later, so the best are connected.
        kept = sorted(sorted(range(len(tokens)), key=lambda entry: -scores[entry])[: shape.size])
        node_of = {-1: 0} | {entry: at for at, entry in enumerate(kept, start=1)}
        return Proposal(tuple(tokens[e] for e in kept), tuple(node_of[parents[e]] for e in kept))
