"""Greedy decoding is the target's own, whatever the head drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from capture_hooks.decoding import SpeculativeDecoder, TreeShape
from capture_hooks.errors import DecodingError
from capture_hooks.testing import tiny

FIRST = 3


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=3)


def prompts(size=6):
    return st.lists(st.integers(3, tiny.VOCAB - 1), max_size=size).map(
        lambda rest: torch.tensor([[FIRST, *rest]])
    )


def plain(model, ids, **arguments):
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **arguments)


SHAPES = st.one_of(
    st.none(), st.builds(TreeShape, depth=st.integers(1, 4), branch=st.integers(1, 3), size=st.integers(1, 8))
)


@given(
    ids=prompts(),
    hit=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    draft_tokens=st.integers(1, 5),
    tree=SHAPES,
    min_confidence=st.sampled_from([0.0, 0.05]),
    new=st.integers(1, 14),
)
@settings(max_examples=30, deadline=None)
def test_any_draft_gives_the_tokens_of_generate(
    llama, knowing_head, ids, hit, draft_tokens, tree, min_confidence, new
):
    head = knowing_head(llama, FIRST, hit)
    decoder = SpeculativeDecoder(
        llama, head, draft_tokens, tree, min_confidence=min_confidence, anatomy=head.anatomy
    )
    result = decoder.generate(ids, new, do_sample=False)
    assert torch.equal(result.sequences, plain(llama, ids, max_new_tokens=new))
    assert torch.equal(result.sequences[0, ids.shape[1] :], result.tokens)
    assert result.stats.tokens == len(result.tokens) - 1


def test_a_head_that_is_always_right_gains_every_draft(llama, knowing_head):
    ids = torch.tensor([[FIRST, 9, 40]])
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 1.0), 4)
    stats = decoder.generate(ids, 21, do_sample=False, eos_token_id=None).stats
    assert (stats.rounds, stats.tokens) == (4, 20)
    assert stats.acceptance_length == 5
    assert stats.conditional_acceptance == (1.0,) * 4


def test_a_draft_vocabulary_without_the_answer_costs_acceptance_only(llama, knowing_head):
    ids = torch.tensor([[FIRST, 9, 40]])
    expected = plain(llama, ids, max_new_tokens=16)
    few = torch.tensor(sorted(set(expected[0, 3::2].tolist()) | {5}))
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 1.0, few), 4)
    assert torch.equal(decoder.generate(ids, 16, do_sample=False).sequences, expected)


@pytest.mark.parametrize("tree", [None, TreeShape(4, 2, 6)])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_other_families(family, tree, knowing_head):
    model = tiny.model(family, num_hidden_layers=2)
    ids = torch.tensor([[FIRST, 9, 40, 7]])
    decoder = SpeculativeDecoder(model, knowing_head(model, FIRST, 0.8), 4, tree)
    assert torch.equal(
        decoder.generate(ids, 20, do_sample=False).sequences, plain(model, ids, max_new_tokens=20)
    )


def test_a_sliding_window(knowing_head):
    model = tiny.model("gemma2", num_hidden_layers=2)
    assert model.config.sliding_window == 8
    decoder = SpeculativeDecoder(model, knowing_head(model, FIRST, 0.7), 4)
    short = torch.tensor([[FIRST, 9]])
    assert torch.equal(
        decoder.generate(short, 5, do_sample=False).sequences, plain(model, short, max_new_tokens=5)
    )
    ids = torch.tensor([[FIRST, 9, 40, 7, 12, 90, 4, 5, 6, 33]])
    if not hasattr(DynamicCache, "activate_past_recording"):
        # Older transformers forget what slides out at once.
        with pytest.raises(DecodingError, match="slides over 8 tokens"):
            decoder.generate(ids, 24, do_sample=False)
        return
    result = decoder.generate(ids, 24, do_sample=False)
    assert torch.equal(result.sequences, plain(model, ids, max_new_tokens=24))
    assert 0 < sum(result.stats.accepted) < result.stats.drafted


@pytest.mark.parametrize("tree", [None, TreeShape(4, 2, 8)])
def test_an_end_token_inside_an_accepted_run_ends_the_answer(llama, knowing_head, tree):
    ids = torch.tensor([[FIRST, 9, 40]])
    free = plain(llama, ids, max_new_tokens=20, eos_token_id=None)[0, 3:].tolist()
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 1.0), 5, tree)
    for at in range(6):
        stops = [271, free[at]]
        result = decoder.generate(ids, 20, do_sample=False, eos_token_id=stops, pad_token_id=0)
        expected = plain(llama, ids, max_new_tokens=20, eos_token_id=stops, pad_token_id=0)
        assert torch.equal(result.sequences, expected)
        assert result.tokens[-1] == free[at]


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 8, "eos_token_id": list(range(3, 200)), "pad_token_id": 0},
        {"suppress_tokens": list(range(60))},
        {"forced_eos_token_id": 7},
    ],
    ids=lambda a: next(iter(a)),
)
@pytest.mark.parametrize("tree", [None, TreeShape(3, 3, 8)])
def test_processors_that_read_the_tokens_see_each_path(llama, knowing_head, arguments, tree):
    ids = torch.tensor([[FIRST, 9, 40, 9, 40]])
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 0.9), 4, tree)
    expected = plain(llama, ids, max_new_tokens=16, **arguments)
    assert torch.equal(decoder.generate(ids, 16, do_sample=False, **arguments).sequences, expected)


def test_streaming_yields_rounds_and_leaves_no_mode_on(llama, knowing_head):
    ids = torch.tensor([[FIRST, 9, 40]])
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 0.8), 3)
    tokens = []
    for step in decoder.stream(ids, 15, do_sample=False):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        assert len(step.tokens) <= step.accepted + 1
        tokens += step.tokens
        tiny_hooks = [m for m in llama.modules() if m._forward_hooks or m._forward_pre_hooks]
        assert not tiny_hooks
    assert tokens == plain(llama, ids, max_new_tokens=15)[0, 3:].tolist()
