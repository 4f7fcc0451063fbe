"""Muon for matrices and AdamW for the rest: torch's own, as one optimiser to whoever drives it."""

import copy

import pytest
import torch
from capture_hooks_eagle3.provider import Eagle3Provider
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.capture import find_anatomy
from capture_hooks.errors import TrainingError
from capture_hooks.heads.readout import readout_of
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny
from capture_hooks.training import TrainConfig
from capture_hooks.training.optimizers import MuonWithAdamW, muon_for

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=2), min_size=1, max_size=4),
    steps=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_it_is_torchs_two_optimisers_side_by_side(shapes, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = copy.deepcopy(ours)

    def split(parameters):
        return [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]

    both = MuonWithAdamW(*split(ours), lr=0.1, weight_decay=0.05, betas=(0.8, 0.9))
    matrices, others = split(theirs)
    apart = []
    if matrices:
        apart.append(torch.optim.Muon(matrices, lr=0.1, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"))
    if others:
        apart.append(torch.optim.AdamW(others, lr=0.1, weight_decay=0.0, betas=(0.8, 0.9)))
    for step in range(steps):
        for group in [*both.param_groups, *(g for o in apart for g in o.param_groups)]:
            group["lr"] = 0.1 / (step + 1)  # as a schedule does
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        both.step()
        for optimizer in apart:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def eagle3(config):
    model = tiny.llama(num_hidden_layers=8)
    spec = CaptureSpec.parse("post.1, post.3, post.5").absolute(8)
    anatomy = find_anatomy(model)
    provider = Eagle3Provider()
    # As many draft tokens as the stream is wide: shapes alone do not tell a table from a map.
    draft_ids = torch.arange(anatomy.hidden_size)
    return provider.create(
        provider.config_type(**config), spec, anatomy, readout_of(anatomy, spec), draft_ids
    )


@pytest.mark.parametrize("config", [{}, {"train_lm_head": True, "train_embedding": True}])
def test_rows_that_are_tokens_are_left_to_adamw(config):
    head = eagle3(config)
    optimizer = muon_for(head, TrainConfig(steps=1, optimizer="muon"))
    matrices, others = (set(map(id, group["params"])) for group in optimizer.param_groups)
    named = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert matrices | others == set(map(id, named.values()))
    for name, p in named.items():
        table = "lm_head" in name or "embedding" in name
        assert (id(p) in matrices) == (p.ndim == 2 and not table), name


def test_a_restored_state_continues_at_the_same_bits():
    def made():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))

    def optimizer_of(module):
        matrices = [p for p in module.parameters() if p.ndim == 2]
        others = [p for p in module.parameters() if p.ndim != 2]
        return MuonWithAdamW(matrices, others, lr=0.1, weight_decay=0.1, betas=(0.9, 0.95))

    def steps(module, optimizer, count):
        for i in range(count):
            optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.1 / (i + 1)
            optimizer.zero_grad()
            module(torch.full((3, 4), float(i))).square().sum().backward()
            optimizer.step()

    whole, first = made(), made()
    driver = optimizer_of(whole)
    steps(whole, driver, 2)
    early = optimizer_of(first)
    steps(first, early, 2)
    second = made()
    second.load_state_dict(first.state_dict())
    late = optimizer_of(second)
    late.load_state_dict(copy.deepcopy(early.state_dict()))
    steps(whole, driver, 3)
    steps(second, late, 3)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(second[0].weight, first[0].weight)


def test_a_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(TrainingError, match=r"optimizer=muon needs torch >= 2\.9"):
        MuonWithAdamW([], [], lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
