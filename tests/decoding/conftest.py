"""A head that knows its target and checks everything the decoder feeds it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capture_hooks.capture import Anatomy, find_anatomy
from capture_hooks.heads.contract import DraftHead, StepSums, TrainBatch
from capture_hooks.heads.drafting import Drafting, StepwiseDrafter
from capture_hooks.spec import CaptureSpec

torch.set_num_threads(1)
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "store")]  # helpers of the tests, here and there


class KnowingHead(DraftHead):
    """Drafts the target's own next-token logits for a share ``hit`` of all prefixes, random ones else.

    It recomputes everything from the token prefixes without a cache, and raises AssertionError where the
    decoder hands it states, rows, positions or masks that do not belong to them.
    """

    name = "knowing"
    check_states = True  # a full uncached forward each time: thousands of runs leave it out

    def __init__(
        self, model, anatomy: Anatomy, first: int, hit: float, vocabulary: Tensor | None = None
    ) -> None:
        super().__init__()
        self.spec = CaptureSpec.parse("embed, post.0, post.-1").absolute(anatomy.n_layers)
        self.target_layers = anatomy.n_layers
        self._target = (model, anatomy)  # in a tuple: not this module's to register
        self.first, self.hit = first, hit
        self._ids = torch.arange(anatomy.vocab_size) if vocabulary is None else vocabulary
        self._prefixes: list[tuple[int, ...]] = []
        self._memo: dict[tuple[int, ...], Tensor] = {}

    def forward(self, batch: TrainBatch) -> StepSums:
        raise NotImplementedError

    def new_cache(self, max_length: int) -> list[tuple[int, ...]]:
        self._limit = max_length
        return []

    def extend(self, cache, states: Tensor, next_ids: Tensor, start: int) -> Tensor:
        assert len(states) == len(next_ids) > 0
        del cache[start:]
        assert len(cache) == start, "rows were skipped"
        tokens = [self.first] if not cache else list(cache[-1])
        for token in next_ids.tolist():
            tokens.append(token)
            cache.append(tuple(tokens))
        if not states.any() and len(cache) == 1 and self._limit == 2:
            return self._hidden(cache)  # the decoder's check at construction
        if self.check_states:
            expected = self._states(cache[-1][:-1])[start:]
            torch.testing.assert_close(states, expected, rtol=2e-3, atol=2e-4)
        return self._hidden(cache[start:])

    def step(
        self, cache, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        rows = [
            self._prefixes[int(parent)] + (token,)
            for parent, token in zip(hidden[:, 0], ids.tolist(), strict=True)
        ]
        assert positions.tolist() == [len(row) - 2 for row in rows]
        cache.extend(rows)
        assert len(cache) <= self._limit, "more rows than the cache was asked to hold"
        # A path holds one row per length, so a row must see exactly the rows that are prefixes of it.
        wanted = torch.tensor([[row[: len(other)] == other for other in cache] for row in rows])
        if mask is None:
            mask = torch.ones(len(rows), len(cache), dtype=torch.bool).tril(len(cache) - len(rows))
        assert torch.equal(mask, wanted)
        return self._hidden(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.stack([self._draft_logits(self._prefixes[int(row)]) for row in hidden[:, 0]])

    def drafter(self, max_length: int, drafting: Drafting) -> StepwiseDrafter:
        return StepwiseDrafter(self, max_length, drafting)

    @property
    def anatomy(self) -> Anatomy:
        return self._target[1]

    @property
    def draft_token_ids(self) -> Tensor:
        return self._ids

    def export(self, order):
        raise NotImplementedError

    def _hidden(self, rows: list[tuple[int, ...]]) -> Tensor:
        start = len(self._prefixes)
        self._prefixes.extend(rows)
        hidden = torch.zeros(len(rows), self._target[1].hidden_size)
        hidden[:, 0] = torch.arange(start, start + len(rows))
        return hidden

    def _states(self, tokens: tuple[int, ...]) -> Tensor:
        model, anatomy = self._target
        seen: dict[int, Tensor] = {}
        handles = [
            anatomy.layers[k].register_forward_hook(lambda m, a, out, k=k: seen.__setitem__(k, _first(out)))
            for k in (0, anatomy.n_layers - 1)
        ]
        handles.append(
            anatomy.layers[0].register_forward_pre_hook(
                lambda m, a, kw: seen.__setitem__(-1, a[0] if a else kw["hidden_states"]), with_kwargs=True
            )
        )
        try:
            model(torch.tensor([tokens]), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([seen[-1][0], seen[0][0], seen[anatomy.n_layers - 1][0]], -1)

    def _draft_logits(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self._memo:
            dice = random.Random(hashlib.sha256(repr(prefix).encode()).digest())
            if dice.random() < self.hit:
                full = self._target[0](torch.tensor([prefix]), use_cache=False).logits[0, -1].float()
            else:
                full = torch.tensor([dice.gauss(0, 2) for _ in range(self._target[1].vocab_size)])
            self._memo[prefix] = full[self._ids]
        return self._memo[prefix]


def _first(output):
    return output[0] if isinstance(output, tuple) else output


@pytest.fixture(scope="session")
def knowing_head() -> Callable[..., KnowingHead]:
    """Make a `KnowingHead` for a model and the first token of the prompts it will see."""

    anatomies: dict[int, Anatomy] = {}

    def make(model, first: int, hit: float, vocabulary: Tensor | None = None) -> KnowingHead:
        anatomy = anatomies.get(id(model))
        if anatomy is None or anatomy.model is not model:
            anatomy = anatomies[id(model)] = find_anatomy(model)
        return KnowingHead(model, anatomy, first, hit, vocabulary)

    return make


@pytest.fixture(scope="session")
def eagle3_head():
    """A random EAGLE-3 head for a model, every point of its small default spec."""
    from capture_hooks.heads import readout_of
    from capture_hooks.plugins import registry
    from capture_hooks.testing import tiny

    def make(model, seed: int = 0) -> DraftHead:
        provider = registry().heads["eagle3"]
        anatomy = find_anatomy(model)
        spec = CaptureSpec.parse("embed, post.0, post.-1").absolute(anatomy.n_layers)
        ids = torch.arange(0, anatomy.vocab_size, 3)
        head = provider.create(provider.config_type(), spec, anatomy, readout_of(anatomy, spec), ids)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tiny.randomise(head)
        return head.eval()

    return make
