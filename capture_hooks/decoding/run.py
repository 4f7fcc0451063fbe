"""One generation: the prompt's pass, then rounds of draft, verify, accept."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..errors import DecodingError
from ..heads.contract import DraftHead
from ..heads.drafting import Drafting, Proposal
from .acceptance import reject, walk
from .request import Request
from .stats import Round
from .target import Target


class Run:
    """The state of one generation."""

    def __init__(self, target: Target, head: DraftHead, drafting: Drafting, request: Request) -> None:
        self._target = target
        self._head = head
        self._drafting = drafting
        self._request = request
        self._drafter = head.drafter(request.max_length, drafting)
        self._ids: list[int] = request.input_ids[0].tolist()
        # What the head has not been told yet: captured states, and the tokens after them.
        self._pending: tuple[list[Tensor], list[int]] = ([], [])
        self.finished = False

    @torch.inference_mode()
    def prompt(self) -> Round:
        """Prefill; gives the first token."""
        start = time.perf_counter()
        ids = self._request.input_ids.to(self._target.device)
        self._target.start(self._request.max_length, self._request.inputs)
        logits, states = self._target.prefill(ids)
        choice = self._request.choice
        token = int(choice.pick(choice.scores(logits, [ids]), self._drafting.generator)[0])
        self._pending = ([states], [*self._ids[1:], token])
        tokens = self._append([token])
        return Round(tokens, 0, 0, 0, verify_seconds=time.perf_counter() - start)

    @torch.inference_mode()
    def round(self) -> Round:
        """Draft, verify, accept."""
        start = time.perf_counter()
        proposal = self._propose()
        drafted = time.perf_counter()
        logits, states = self._target.verify(self._ids[-1], proposal)
        accepted, last = self._accept(proposal, logits)
        verified = time.perf_counter()
        self._target.commit(proposal, accepted)
        gained = [proposal.tokens[node - 1] for node in accepted] + [last]
        rows = states if proposal.is_chain else states[torch.tensor([0, *accepted], device=states.device)]
        self._pending[0].append(rows[: len(gained)])
        self._pending[1].extend(gained)
        tokens = self._append(gained)
        depth = max(proposal.depths())
        end = time.perf_counter()
        return Round(
            tokens,
            len(proposal.tokens),
            depth,
            len(accepted),
            drafted - start,
            verified - drafted,
            end - verified,
        )

    def _propose(self) -> Proposal:
        depth = self._request.max_length - len(self._ids) - 1  # a round gains one token more than it drafts
        shape = self._drafting.tree
        depth = self._target.room(min(depth, self._drafting.depth), None if shape is None else shape.size)
        if depth < 1:
            return Proposal((), ())
        # Rows are handed over only when they are needed: the last round's never are.
        states, following = torch.cat(self._pending[0]), self._pending[1]
        self._pending = ([], [])
        # The states lie where the target's last layer is; the head may live elsewhere.
        device = self._head.draft_token_ids.device
        self._drafter.accept(states.to(device), torch.tensor(following, device=device))
        proposal = self._drafter.propose(depth)
        if len(proposal.tokens) > self._drafting.size or max(proposal.depths()) > depth:
            raise DecodingError(
                f"the head {self._head.name!r} proposed {len(proposal.tokens)} tokens on paths of up to "
                f"{max(proposal.depths())}, and was asked for {self._drafting.size} on paths of up to {depth}"
            )
        return proposal

    def _accept(self, proposal: Proposal, logits: Tensor) -> tuple[list[int], int]:
        choice, generator = self._request.choice, self._drafting.generator
        prefixes: list[Tensor] = []
        if choice.needs_prefixes:
            for node in range(len(proposal.tokens) + 1):
                path = [proposal.tokens[n - 1] for n in proposal.path(node)]
                prefixes.append(torch.tensor([self._ids + path], device=logits.device))
        scores = choice.scores(logits, prefixes)
        if proposal.probabilities is None:
            return walk(proposal, choice.pick(scores, generator).tolist())
        vocabulary = self._head.draft_token_ids.to(logits.device)
        return reject(proposal, choice.probabilities(scores), vocabulary, generator)

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
