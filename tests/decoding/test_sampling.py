"""Sampling follows the target's distribution exactly, whatever the head drafts."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from block_head import make_block_head

from capture_hooks.capture import find_anatomy
from capture_hooks.decoding import SpeculativeDecoder, TreeShape
from capture_hooks.decoding.decoder import reject
from capture_hooks.heads.drafting import Proposal
from capture_hooks.testing import tiny

VOCAB = 8
FIRST = 3
NEW = 3


def p_value(counts: dict, expected: dict[tuple, float], runs: int) -> float:
    """Chi-square test of observed cells against their probabilities; cells expected below 5 are pooled."""
    assert not set(counts) - {cell for cell, p in expected.items() if p > 0}, "an impossible outcome occurred"
    big = [cell for cell, p in expected.items() if p * runs >= 5]
    pairs = [(counts.get(cell, 0), expected[cell] * runs) for cell in big]
    rest = (runs - sum(seen for seen, _ in pairs), runs - sum(want for _, want in pairs))
    if rest[1] > 1e-6:
        pairs.append(rest)
    statistic = sum((seen - want) ** 2 / want for seen, want in pairs)
    freedom = torch.tensor((len(pairs) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


@pytest.fixture(scope="module")
def model():
    return tiny.llama(
        vocab_size=VOCAB, hidden_size=16, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


PROMPT = torch.tensor([[FIRST, 1, 6]])
WARPING = {"temperature": 1.3, "top_k": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def law(model):
    """The joint law of the next tokens, from one uncached forward per prefix."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = (TemperatureLogitsWarper(1.3), TopKLogitsWarper(6), TopPLogitsWarper(0.9))

    @torch.no_grad()
    def following(prefix: tuple[int, ...]) -> list[float]:
        scores = model(torch.tensor([[*PROMPT[0].tolist(), *prefix]]), use_cache=False).logits[:, -1]
        for warper in warpers:
            scores = warper(None, scores)
        return scores.softmax(-1)[0].tolist()

    joint = {(): 1.0}
    for _ in range(NEW):
        tables = {cell: following(cell) for cell in joint}
        joint = {
            (*cell, token): p * tables[cell][token]
            for (cell, p), token in itertools.product(joint.items(), range(VOCAB))
        }
    return joint


RUNS = 400


def observed(decoder, request, generator):
    """How often each answer came in `RUNS`, and how many tokens were accepted and drafted."""
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    accepted = drafted = 0
    for _ in range(RUNS):
        tokens: list[int] = []
        for step in decoder.rounds(request, generator):
            tokens += step.tokens
            accepted += step.accepted
            drafted += step.drafted
            if len(tokens) >= NEW:
                break
        seen[tuple(tokens[:NEW])] += 1
    return seen, accepted, drafted


@pytest.mark.parametrize(
    ("draft_tokens", "tree", "drafting", "min_confidence"),
    [
        (2, None, "greedy", 0.0),
        (2, None, "sample", 0.2),
        (2, TreeShape(2, 3, 6), "greedy", 0.0),
    ],
    ids=["chain", "sampled-stopping-early", "tree"],
)
def test_joint_law_of_three_tokens(model, law, knowing_head, draft_tokens, tree, drafting, min_confidence):
    # Half of the drafts come from another distribution than the target's: a wrong rule would show.
    head = knowing_head(model, FIRST, 0.5, torch.tensor([0, 1, 2, 4, 5, 7]))
    head.check_states = False
    decoder = SpeculativeDecoder(
        model,
        head,
        draft_tokens,
        tree,
        drafting=drafting,
        min_confidence=min_confidence,
        anatomy=head.anatomy,
    )
    generator = torch.Generator().manual_seed(5)
    # One token more than counted, so that two can be drafted after the prompt's own.
    request = decoder.prepare(PROMPT, NEW + 1, do_sample=True, **WARPING)
    seen, accepted, drafted = observed(decoder, request, generator)
    # Acceptance and rejection both happened, often.
    assert RUNS / 5 < accepted < drafted - RUNS / 5
    assert p_value(seen, law, RUNS) > 1e-3


def test_a_block_of_independent_draws_keeps_the_law(model, law):
    """The tokens of a block are drawn at once, each from a distribution that knows none of the others."""
    anatomy = find_anatomy(model)
    head = make_block_head(model, anatomy, torch.tensor([0, 1, 2, 4, 5, 7]), seed=3, block=2)
    decoder = SpeculativeDecoder(model, head, 2, min_confidence=0.2, anatomy=anatomy)
    generator = torch.Generator().manual_seed(5)
    request = decoder.prepare(PROMPT, NEW + 1, do_sample=True, **WARPING)
    seen, accepted, drafted = observed(decoder, request, generator)
    assert RUNS / 5 < accepted < drafted - RUNS / 5
    assert p_value(seen, law, RUNS) > 1e-3


def test_the_test_sees_a_wrong_law(law):
    """Power: the classic mistake, sampling p itself after a rejection, is seen at this number of runs."""
    wrong: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW):
        grown = {}
        for prefix, chance in wrong.items():
            inside = {cell: p for cell, p in law.items() if cell[: len(prefix)] == prefix}
            total = sum(inside.values())
            p = [
                sum(q for cell, q in inside.items() if cell[len(prefix)] == token) / max(total, 1e-30)
                for token in range(VOCAB)
            ]
            drafted = max(range(VOCAB), key=p.__getitem__)
            for token in range(VOCAB):
                share = p[token] * (1 - p[drafted]) + (p[drafted] if token == drafted else 0.0)
                grown[(*prefix, token)] = chance * share
        wrong = grown
    cells = list(wrong)
    weights = torch.tensor([wrong[cell] for cell in cells])
    draws = torch.multinomial(weights, RUNS, replacement=True, generator=torch.Generator().manual_seed(0))
    seen = collections.Counter(cells[at] for at in draws.tolist())
    assert p_value(seen, law, RUNS) < 1e-6


def test_rejection_rule_on_many_draws():
    """`reject` alone, 12 000 draws: the emitted token follows p, for overlapping and disjoint proposals."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([[0.5, 0.2, 0.0, 0.3], [0.1, 0.2, 0.3, 0.4]])
    ids = torch.tensor([0, 2, 3])
    for q in (
        torch.tensor([[0.2, 0.5, 0.3]]),
        torch.tensor([[0.0, 1.0, 0.0]]),
        torch.tensor([[1.0, 0.0, 0.0]]),
    ):
        counts: collections.Counter[tuple[int, ...]] = collections.Counter()
        runs = 4_000
        drafted = torch.multinomial(q[0], runs, replacement=True, generator=generator)
        for index in drafted.tolist():
            token = int(ids[index])
            accepted, last = reject(Proposal.chain([token], q), p, ids, generator)
            counts[(token, last) if accepted else (last,)] += 1
        first = collections.Counter()
        for cell, count in counts.items():
            first[cell[0]] += count
        assert p_value(first, {t: float(p[0, t]) for t in range(4)}, runs) > 1e-3
        both = {cell[1]: count for cell, count in counts.items() if len(cell) == 2 and cell[0] == 0}
        if sum(both.values()) > 500:
            assert p_value(both, {t: float(p[1, t]) for t in range(4)}, sum(both.values())) > 1e-3


def test_the_same_seed_gives_the_same_tokens(model, knowing_head):
    decoder = SpeculativeDecoder(model, knowing_head(model, FIRST, 0.5), 3)
    first, second, third = (
        decoder.generate(
            PROMPT, 12, do_sample=True, generator=torch.Generator().manual_seed(seed)
        ).tokens.tolist()
        for seed in (1, 1, 2)
    )
    assert first == second != third
