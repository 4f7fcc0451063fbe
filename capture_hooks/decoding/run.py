"""One generation: the prompt's pass, then rounds of draft, verify, accept."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ..heads.contract import DraftHead
from .acceptance import reject, walk
from .drafts import Draft, HeadState, TreeShape, draft_chain, draft_tree
from .request import Request
from .stats import Round
from .target import Target


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a round drafts; see `SpeculativeDecoder` for the meaning of each."""

    tokens: int
    tree: TreeShape | None
    min_confidence: float
    sampled: bool

    @property
    def rows(self) -> int:
        """Most rows a draft adds to the head's cache."""
        return self.tokens if self.tree is None else self.tree.depth * self.tree.branch

    @property
    def depth(self) -> int:
        """Tokens of the longest path of a draft."""
        return self.tokens if self.tree is None else self.tree.depth


class Run:
    """The state of one generation."""

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        drafting: Drafting,
        request: Request,
        generator: torch.Generator | None,
    ) -> None:
        self._target = target
        self._head = head
        self._drafting = drafting
        self._request = request
        self._generator = generator
        self._cache = head.new_cache(request.max_length + drafting.rows)
        self._ids: list[int] = request.input_ids[0].tolist()
        # Rows the head has not seen yet: captured states, the tokens after them, the first one's position.
        self._pending: tuple[list[Tensor], list[int], int] | None = None
        self.finished = False

    @torch.inference_mode()
    def prompt(self) -> Round:
        """Prefill; gives the first token."""
        start = time.perf_counter()
        ids = self._request.input_ids.to(self._target.device)
        self._target.start(self._request.max_length, self._request.inputs)
        logits, states = self._target.prefill(ids)
        choice = self._request.choice
        token = int(choice.pick(choice.scores(logits, [ids]), self._generator)[0])
        self._pending = ([states], [*self._ids[1:], token], 0)
        tokens = self._append([token])
        return Round(tokens, 0, 0, 0, verify_seconds=time.perf_counter() - start)

    @torch.inference_mode()
    def round(self) -> Round:
        """Draft, verify, accept."""
        start = time.perf_counter()
        draft = self._draft()
        drafted = time.perf_counter()
        logits, states = self._target.verify(self._ids[-1], draft)
        accepted, last = self._accept(draft, logits)
        verified = time.perf_counter()
        self._target.commit(draft, accepted)
        gained = [draft.tokens[node - 1] for node in accepted] + [last]
        rows = states if draft.is_chain else states[torch.tensor([0, *accepted], device=states.device)]
        before, following, first = self._pending or ([], [], len(self._ids) - 1)
        self._pending = ([*before, rows[: len(gained)]], following + gained, first)
        tokens = self._append(gained)
        depth = max(draft.depths())
        end = time.perf_counter()
        return Round(
            tokens,
            len(draft.tokens),
            depth,
            len(accepted),
            drafted - start,
            verified - drafted,
            end - verified,
        )

    def _draft(self) -> Draft:
        drafting, request = self._drafting, self._request
        room = request.max_length - len(self._ids) - 1  # a round gains one token more than it drafts
        size = None if drafting.tree is None else drafting.tree.size
        room = self._target.room(min(room, drafting.depth), size)
        if room < 1:
            return Draft((), ())
        assert self._pending is not None
        parts, following, first = self._pending
        self._pending = None
        states = torch.cat(parts)
        # The states lie where the target's last layer is; the head may live elsewhere.
        device = self._head.draft_token_ids.device
        tokens = torch.tensor(following, device=device)
        hidden = self._head.extend(self._cache, states.to(device), tokens, first)
        state = HeadState(self._cache, hidden[-1:], first + len(following) - 1)
        if drafting.tree is not None:
            return draft_tree(self._head, state, drafting.tree, room, drafting.min_confidence)
        sampled = request.choice.sample and drafting.sampled
        return draft_chain(
            self._head,
            state,
            room,
            drafting.min_confidence,
            request.choice.warp if sampled else None,
            self._generator,
        )

    def _accept(self, draft: Draft, logits: Tensor) -> tuple[list[int], int]:
        choice = self._request.choice
        prefixes: list[Tensor] = []
        if choice.needs_prefixes:
            for node in range(len(draft.tokens) + 1):
                path = [draft.tokens[n - 1] for n in draft.path(node)]
                prefixes.append(torch.tensor([self._ids + path], device=logits.device))
        scores = choice.scores(logits, prefixes)
        if draft.proposals is None:
            return walk(draft, choice.pick(scores, self._generator).tolist())
        return reject(
            draft,
            choice.probabilities(scores),
            self._head.draft_token_ids.to(logits.device),
            self._generator,
        )

    def _append(self, gained: list[int]) -> tuple[int, ...]:
        """Add tokens up to the first one that ends the answer."""
        request = self._request
        kept: list[int] = []
        for token in gained:
            self._ids.append(token)
            kept.append(token)
            if token in request.eos or len(self._ids) >= request.max_length or self._stopped():
                self.finished = True
                break
        return tuple(kept)

    def _stopped(self) -> bool:
        request = self._request
        return bool(request.criteria) and request.stopped(
            torch.tensor([self._ids], device=self._target.device)
        )
