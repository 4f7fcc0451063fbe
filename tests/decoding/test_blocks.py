"""A head that drafts a block in one pass is decoded, scored and tested as one that goes step by step is."""

from __future__ import annotations

import pytest
import torch
from block_head import BlockHead, BlockProvider, make_block_head
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.decoding import SpeculativeDecoder, TreeShape, offline_acceptance
from capture_hooks.decoding.stats import DecodeStats
from capture_hooks.errors import DecodingError
from capture_hooks.heads import TrainBatch
from capture_hooks.heads.drafting import Drafting, Proposal
from capture_hooks.testing import tiny
from capture_hooks.testing.contracts import HeadContract


class TestBlockHead(HeadContract):
    """The contract of heads, of a head without steps."""

    def provider(self) -> BlockProvider:
        return BlockProvider()

    # A directory is loaded with what is installed, and this head is not.
    test_a_saved_head_loads = None  # type: ignore[assignment]  # see above


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=2)


PROMPTS = [torch.tensor([[3, 9, at, 7]]) for at in (40, 41, 42, 43)]


def plain(model, ids, **arguments):
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **arguments)


@pytest.fixture(scope="module")
def trained(llama):
    """A head that has learnt the answers to `PROMPTS`, so that drafts are accepted."""
    anatomy = find_anatomy(llama)
    head = make_block_head(llama, anatomy, torch.arange(0, anatomy.vocab_size), block=4)
    texts = [plain(llama, ids, max_new_tokens=24, eos_token_id=None) for ids in PROMPTS]
    with bind(llama, head.spec, target=True) as capture, torch.no_grad():
        llama(torch.cat(texts), use_cache=False)
    states, length = capture.states, texts[0].shape[1]
    batch = TrainBatch(
        states.packed,
        states.target,
        torch.cat(texts).flatten(),
        torch.ones(len(PROMPTS) * length, dtype=torch.bool),
        torch.arange(len(PROMPTS) + 1) * length,
    )
    optimizer = torch.optim.AdamW(head.parameters(), 0.01)
    head.train()
    for _ in range(80):
        optimizer.zero_grad()
        head(batch).mean().backward()
        optimizer.step()
    return head.eval()


@given(
    rest=st.lists(st.integers(3, tiny.VOCAB - 1), max_size=6),
    known=st.sampled_from([None, 0, 1, 2, 3]),
    draft_tokens=st.integers(1, 6),
    tree=st.sampled_from([None, TreeShape(2, 2, 3), TreeShape(5, 2, 2)]),
    min_confidence=st.sampled_from([0.0, 0.3]),
    new=st.integers(1, 20),
)
@settings(max_examples=30, deadline=None)
def test_greedy_is_generates(llama, trained, rest, known, draft_tokens, tree, min_confidence, new):
    """Blocks shorter and longer than what is asked for, whatever the prompt."""
    ids = torch.tensor([[3, *rest]]) if known is None else PROMPTS[known]
    decoder = SpeculativeDecoder(llama, trained, draft_tokens, tree, min_confidence=min_confidence)
    result = decoder.generate(ids, new, do_sample=False)
    assert torch.equal(result.sequences, plain(llama, ids, max_new_tokens=new))


def test_a_block_is_accepted_whole_and_costs_one_pass(llama, trained):
    decoder = SpeculativeDecoder(llama, trained, 6)
    before, stats = trained.passes, DecodeStats()
    for ids in PROMPTS:
        stats += decoder.generate(ids, 21, do_sample=False, eos_token_id=None).stats
    assert trained.passes - before == stats.reached[0]  # one pass a draft
    assert stats.drafted <= 4 * stats.rounds  # six were asked for, and a block has four
    assert len(stats.accepted) == 4
    assert stats.accepted[3] > 0
    assert stats.acceptance_length > 2
    unknown = decoder.generate(torch.tensor([[5, 77, 130]]), 21, do_sample=False, eos_token_id=None).stats
    assert unknown.acceptance_length < 2


def test_sampling_reads_every_prefix(llama, trained):
    """Seeded; processors that read the tokens before each row see each path of a block."""
    decoder = SpeculativeDecoder(llama, trained, 4)
    how = {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.3}
    first, second = (
        decoder.generate(PROMPTS[1], 16, generator=torch.Generator().manual_seed(8), **how).tokens
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_teacher_forced_acceptance_counts_what_would_be_proposed(llama, trained):
    """A slot depends on no drafted token, so proposals give the hits of every position."""
    ids = torch.cat([plain(llama, PROMPTS[2], max_new_tokens=12)[0], torch.tensor([5, 9, 11, 4])])
    mask = torch.arange(len(ids)) >= 4
    result = offline_acceptance(llama, trained, [(ids, mask)])
    with bind(llama, trained.spec) as capture, torch.no_grad():
        greedy = llama(ids[None]).logits[0].argmax(-1)
    drafter = trained.drafter(len(ids), Drafting(4))
    hits, rows = [0] * 4, [0] * 4
    with torch.inference_mode():
        for t in range(len(ids) - 2):
            drafter.accept(capture.states.packed[t : t + 1], ids[t + 1 : t + 2])
            for j, token in enumerate(drafter.propose(4).tokens):
                if t + 2 + j < len(ids) and mask[t + 2 + j]:
                    rows[j] += 1
                    hits[j] += token == int(greedy[t + 1 + j])
    assert list(result.rows) == rows
    assert list(result.hits) == hits
    assert 0 < sum(hits) < sum(rows)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Proposal((5, 6, 7), (0, 1, 2)), "proposed 3 tokens on paths of up to 3, and was asked for 2 on"),
        (Proposal((5, 6, 7), (0, 0, 0)), "proposed 3 tokens on paths of up to 1, and was asked for 2 on"),
        (Proposal((5,), (0,), torch.ones(1, 20) / 20), "sampled its tokens, and was asked for the most"),
    ],
    ids=["deep", "wide", "sampled"],
)
def test_a_proposal_that_was_not_asked_for_is_an_error(llama, wrong, message):
    anatomy = find_anatomy(llama)

    class Greedy:
        def accept(self, states, next_ids):
            pass

        def propose(self, depth):
            return wrong

    class Head(BlockHead):
        def drafter(self, max_length, drafting):
            return super().drafter(max_length, drafting) if max_length == 1 else Greedy()

    head = make_block_head(llama, anatomy, torch.arange(20))
    head.__class__ = Head
    with pytest.raises(DecodingError, match=f"the head 'block' {message}"):
        SpeculativeDecoder(llama, head, 2).generate(PROMPTS[0], 8, do_sample=False)
