"""The cache that is rolled back holds what transformers' own would."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from capture_hooks.capture import bind
from capture_hooks.decoding import SpeculativeDecoder, caches
from capture_hooks.decoding.packed import MEASURED_ROWS, KernelChoice, PackedLinears, layouts
from capture_hooks.decoding.target import Target
from capture_hooks.errors import DecodingError
from capture_hooks.heads.drafting import Drafting, Proposal, TreeShape
from capture_hooks.testing import tiny

ADD = st.tuples(st.just("add"), st.integers(1, 300))
DROP = st.tuples(st.just("drop"), st.integers(0, 40))
KEEP = st.tuples(st.just("keep"), st.lists(st.integers(0, 9), max_size=5, unique=True).map(sorted))


@given(st.lists(st.one_of(ADD, DROP, KEEP), min_size=1, max_size=12), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_buffered_layer_equals_concatenation(steps, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = caches.BufferLayer()
    cache = DynamicCache()
    cache.layers = [layer]
    keys, values = torch.empty(1, 2, 0, 4), torch.empty(1, 2, 0, 3)
    for kind, what in steps:
        if kind == "add":
            new = (
                torch.rand(1, 2, what, 4, generator=generator),
                torch.rand(1, 2, what, 3, generator=generator),
            )
            keys, values = torch.cat([keys, new[0]], 2), torch.cat([values, new[1]], 2)
            got = layer.update(*new)
            assert torch.equal(got[0], keys)
            assert torch.equal(got[1], values)
        elif kind == "drop" and what <= keys.shape[2]:
            caches.drop(cache, what)
            keys, values = (x[:, :, : x.shape[2] - what] for x in (keys, values))
        elif kind == "keep" and keys.shape[2] >= 10:
            start = keys.shape[2] - 10
            caches.keep_path(cache, start, what)
            rows = [*range(start), *(start + row for row in what)]
            keys, values = keys[:, :, rows], values[:, :, rows]
        assert layer.get_seq_length() == keys.shape[2]
    if layer.is_initialized:
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=2)


def whole(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def test_a_verified_tree_gives_every_path_its_own_logits(llama):
    target = Target(llama, bind(llama, "post.0"))
    prompt, root = [3, 8, 9, 4], 7
    draft = Proposal((5, 6, 11, 12, 13), (0, 0, 1, 2, 3))
    target.start(20)
    target.prefill(torch.tensor([prompt]))
    logits, states = target.verify(root, draft)
    for node in range(6):
        path = [*prompt, root, *(draft.tokens[n - 1] for n in draft.path(node))]
        torch.testing.assert_close(logits[node], whole(llama, path)[-1], rtol=1e-4, atol=1e-4)
    target.commit(draft, [2, 4])
    again, _ = target.verify(20, Proposal.chain([21]))
    expected = whole(llama, [*prompt, root, 6, 12, 20, 21])[-2:]
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-4)
    assert states.shape == (6, tiny.HIDDEN)


def forced(packed, layout):
    """The same copies whatever this machine measures: every weight in one layout, for 2 to 8 rows."""
    packed._choices = {
        (m.out_features, m.in_features): KernelChoice(layout, frozenset({2, 3, 4, 6, 8}))
        for m in packed._linears
    }
    packed.refresh()
    return packed


LAYOUTS = pytest.mark.parametrize("layout", layouts(), ids=lambda layout: layout.name)


@LAYOUTS
def test_packed_kernels_agree_and_leave_the_model_as_found(llama, layout):
    packed = forced(PackedLinears(llama), layout)
    linears = [m for m in llama.modules() if type(m) is torch.nn.Linear]
    for rows in (2, 4, 5, 8):
        ids = torch.randint(3, 200, (1, rows), generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            plain = llama(ids).logits
            with packed.verifying(rows):
                assert all("forward" in m.__dict__ for m in linears)
                quick = llama(ids).logits
        torch.testing.assert_close(quick, plain, rtol=1e-4, atol=1e-4)
    with pytest.raises(ZeroDivisionError), packed.verifying(4):
        _ = 1 / 0
    for rows in (1, 9, 17):
        with packed.verifying(rows):
            assert not any("forward" in m.__dict__ for m in linears)


@LAYOUTS
def test_weights_changed_in_place_are_packed_anew(layout):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16))
    packed = forced(PackedLinears(model), layout)
    with torch.no_grad():
        model[0].weight.mul_(2)
    packed.refresh()
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    with packed.verifying(3), torch.no_grad():
        quick = model(x)
    torch.testing.assert_close(quick, model(x), rtol=1e-5, atol=1e-6)
    assert packed.extra_bytes >= 8 * 16 * 4


def test_kernels_are_chosen_by_measuring(llama, knowing_head):
    packed = PackedLinears(llama)
    decoder = SpeculativeDecoder(llama, knowing_head(llama, 3, 0.8), 3, kernels=packed)
    assert decoder.settings()["kernels"] == "packed"
    shapes = {tuple(m.weight.shape) for m in llama.modules() if type(m) is torch.nn.Linear}
    assert packed.choices().keys() <= shapes
    for name, rows in packed.choices().values():
        assert name in {layout.name for layout in layouts()}
        assert set(rows) <= set(MEASURED_ROWS)
    ids = torch.tensor([[3, 9, 40]])
    expected = llama.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(decoder.generate(ids, 12, do_sample=False).sequences, expected)


def test_someone_elses_forward_is_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16))
    model[0].forward = lambda x: x
    with pytest.raises(DecodingError, match="this target has none"):
        PackedLinears(model)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_visibility_is_the_path(choices):
    parents = tuple(choice % (at + 1) for at, choice in enumerate(choices))
    draft = Proposal(tuple(range(len(parents))), parents)
    seen, depths = draft.visibility(), draft.depths()
    for node in range(len(parents) + 1):
        path = draft.path(node)
        assert seen[node].nonzero().flatten().tolist() == sorted([0, *path] if node else [0])
        assert depths[node] == len(path)
    assert draft.is_chain == (parents == tuple(range(len(parents))))


def test_a_tree_keeps_the_most_probable_connected_nodes(llama, knowing_head):
    head = knowing_head(llama, 3, 1.0)
    head.check_states = False
    drafter = head.drafter(100, Drafting(3, TreeShape(3, 3, 7)))
    drafter.accept(torch.zeros(2, 1), torch.tensor([8, 9]))
    draft = drafter.propose(3)
    assert len(draft.tokens) == 7
    assert max(draft.depths()) <= 3
    # The rule again, on paths of tokens: expand the 3 best leaves of each level, keep the 7 best of all.
    chances: dict[tuple[int, ...], float] = {}
    leaves = {(): 0.0}
    for _ in range(3):
        level = {}
        for path, chance in leaves.items():
            logp = whole(llama, [3, 8, 9, *path])[-1].log_softmax(-1)
            level |= {(*path, token): chance + float(logp[token]) for token in logp.topk(3).indices.tolist()}
        chances |= level
        leaves = dict(sorted(level.items(), key=lambda item: -item[1])[:3])
    best = {path for path, _ in sorted(chances.items(), key=lambda item: -item[1])[:7]}
    assert {tuple(draft.tokens[n - 1] for n in draft.path(node)) for node in range(1, 8)} == best
