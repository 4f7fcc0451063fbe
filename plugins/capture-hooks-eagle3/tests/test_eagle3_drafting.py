"""Drafting equals what training-time test teaches, row by row, in float64; and the cache's bookkeeping."""

from __future__ import annotations

import pytest
import torch
from capture_hooks_eagle3 import Eagle3Config, Eagle3Head
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capture_hooks.errors import DecodingError
from capture_hooks.heads.contract import TargetReadout, TrainBatch
from capture_hooks.heads.drafting import Drafting, TreeShape
from capture_hooks.spec import CaptureSpec

HIDDEN, VOCABULARY, DRAFT = 6, 11, 7
SEEDS = st.integers(0, 2**31)


def make_head(seed: int, *, inputs: int = 3, **settings_: object) -> Eagle3Head:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    config = Eagle3Config(
        heads=4,
        kv_heads=2,
        head_dim=4,
        intermediate_size=8,
        rms_norm_eps=1e-5,
        rope={"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=64,
        **settings_,
    )
    ids = torch.randperm(VOCABULARY, generator=rng)[:DRAFT].sort().values
    spec = CaptureSpec.parse(", ".join(f"post.{i}" for i in range(inputs)))
    head = Eagle3Head(
        config, spec, 8, normal(VOCABULARY, HIDDEN), TargetReadout(normal(VOCABULARY, HIDDEN)), ids
    )
    head = head.double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(normal(*parameter.shape) * 0.4 + (1.0 if parameter.ndim == 1 else 0.0))
    return head


def rows_of(seed: int, length: int, inputs: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    states = torch.randn(length, inputs * HIDDEN, generator=rng, dtype=torch.float64)
    return states, torch.randint(VOCABULARY, (length,), generator=rng)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=SEEDS,
    length=st.integers(3, 12),
    inputs=st.sampled_from([1, 3]),
    layers=st.integers(1, 2),
    steps=st.integers(1, 4),
    norm_output=st.booleans(),
    before=st.booleans(),
)
def test_teacher_forced_drafting_gives_the_loss_of_training(
    seed: int, length: int, inputs: int, layers: int, steps: int, norm_output: bool, before: bool
) -> None:
    """For every context row t: extend to t, step with the true tokens, add up the cross-entropies."""
    head = make_head(
        seed,
        inputs=inputs,
        layers=layers,
        steps=steps,
        norm_output=norm_output,
        norm_before_residual=before,
        outside="renormalise",
    )
    states, ids = rows_of(seed, length, inputs)
    target = torch.randn(length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    everything = torch.ones(length, dtype=torch.bool)
    sums = head(TrainBatch(states, target, ids, everything, torch.tensor([0, length])))

    readout = head._target[0]
    loss = torch.zeros(steps, dtype=torch.float64)
    cache = head.new_cache(length + steps)
    for t in range(length - 1):
        hidden = head.extend(cache, states[t : t + 1], ids[t + 1 : t + 2], t)
        for j in range(steps):
            if t + 2 + j >= length:
                break
            if j > 0:
                token = ids[t + 1 + j].view(1)
                hidden = head.step(cache, hidden, token, torch.tensor([t + j]))
            p = readout.logits(target[t + 1 + j], head.draft_token_ids).softmax(-1)
            loss[j] -= (p * head.logits(hidden)[0].log_softmax(-1)).sum()
    torch.testing.assert_close(sums.loss, loss, rtol=1e-9, atol=1e-9)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31), length=st.integers(2, 14), cut=st.integers(0, 13), layers=st.integers(1, 2)
)
def test_a_prompt_in_parts_equals_the_prompt_at_once_after_drafts_are_dropped(
    seed: int, length: int, cut: int, layers: int
) -> None:
    head = make_head(seed, layers=layers)
    states, ids = rows_of(seed, length)
    cut = min(cut, length - 1)
    whole = head.extend(head.new_cache(length), states, ids, 0)
    cache = head.new_cache(length + 4)
    first = head.extend(cache, states[:cut], ids[:cut], 0)
    if cut:
        drafted = head.step(cache, first[-1:], ids[:1], torch.tensor([cut]))
        head.step(cache, drafted, ids[:1], torch.tensor([cut + 1]))
    rest = head.extend(cache, states[cut:], ids[cut:], cut)  # overwrites the two drafted rows
    torch.testing.assert_close(torch.cat([first, rest]), whole, rtol=1e-12, atol=1e-12)
    again = head.extend(cache, states, ids, 0)  # the cache is reusable
    torch.testing.assert_close(again, whole, rtol=1e-12, atol=1e-12)


def test_a_tree_branch_equals_its_chain() -> None:
    """Four drafted rows of two branches under one mask give what each branch gives alone."""
    head = make_head(5, layers=2)
    states, ids = rows_of(5, 6)
    cache = head.new_cache(16)
    root = head.extend(cache, states, ids, 0)[-1:]
    branches = torch.tensor([[1, 2], [3, 4]])
    alone = []
    for branch in branches:
        head.extend(cache, states, ids, 0)
        first = head.step(cache, root, branch[:1], torch.tensor([6]))
        alone.append((first, head.step(cache, first, branch[1:], torch.tensor([7]))))
    root = head.extend(cache, states, ids, 0)[-1:]
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 7] = mask[1, 6] = False
    firsts = head.step(cache, root.expand(2, -1), branches[:, 0], torch.tensor([6, 6]), mask)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[0, [7, 9]] = mask[1, [6, 8]] = False
    seconds = head.step(cache, firsts, branches[:, 1], torch.tensor([7, 7]), mask)
    torch.testing.assert_close(firsts, torch.cat([a for a, _ in alone]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seconds, torch.cat([b for _, b in alone]), rtol=1e-12, atol=1e-12)


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from capture_hooks_eagle3 import drafting

    head = make_head(6)
    states, ids = rows_of(6, 12)
    whole = head.extend(head.new_cache(12), states, ids, 0)
    monkeypatch.setattr(drafting, "SCORES", 30)
    parts = head.extend(head.new_cache(12), states, ids, 0)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_the_cache_refuses_gaps_and_overflow() -> None:
    head = make_head(7)
    states, ids = rows_of(7, 6)
    cache = head.new_cache(5)
    with pytest.raises(DecodingError, match="holds 0, not 2"):
        head.extend(cache, states[2:4], ids[2:4], 2)
    with pytest.raises(DecodingError, match="6 rows do not fit a cache made for 5"):
        head.extend(cache, states, ids, 0)


def test_what_is_proposed_are_ids_of_the_target() -> None:
    head = make_head(8)
    states, ids = rows_of(8, 6)
    logits = head.logits(head.extend(head.new_cache(6), states, ids, 0)[-1])
    for tree in (None, TreeShape(1, DRAFT, DRAFT)):
        drafter = head.drafter(6, Drafting(1, tree))
        drafter.accept(states, ids)
        best = head.draft_token_ids[logits.topk(1 if tree is None else DRAFT).indices]
        assert drafter.propose(1).tokens == tuple(best.tolist())
    assert bool((head.draft_token_ids.diff() > 0).all())


@settings(max_examples=30, deadline=None)
@given(seed=SEEDS, branch=st.integers(1, 30), size=st.integers(1, 9), room=st.integers(1, 5))
def test_bounds_beyond_the_answer_change_nothing(seed: int, branch: int, size: int, room: int) -> None:
    """Depths that no answer reaches take no memory; leaves that are never kept are not expanded."""
    head = make_head(seed % 5)
    states, ids = rows_of(seed, 4)
    for tree, endless in (
        (None, None),
        (TreeShape(room, branch, size), TreeShape(2**16, branch, size)),
        # Every branch expanded: more nodes are kept than any level has.
        (TreeShape(room, min(branch, size), size), TreeShape(room, branch, size)),
    ):
        found = []
        for drafting in (Drafting(room, tree), Drafting(2**70, endless)):
            drafter = head.drafter(10, drafting)
            drafter.accept(states, ids)
            found.append(drafter.propose(room))
        assert found[0] == found[1]
