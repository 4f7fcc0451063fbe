import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_hooks.errors import TrainingError
from capture_hooks.store import Example, Examples
from capture_hooks.training.data import LiveSequences
from capture_hooks.training.split import (
    choose_draft_vocabulary,
    coverage,
    prompt_key,
    split_by_prompt,
    token_counts,
)


def example(prompt, answer, conversation=None):
    mask = torch.tensor([False] * len(prompt) + [True] * len(answer))
    ids = torch.tensor([*prompt, *answer], dtype=torch.int64)
    return Example(ids, mask, "", conversation=conversation)


prompts = st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=5), min_size=2, max_size=60)
quick = settings(max_examples=50, deadline=None)


def sides(examples, share):
    split = split_by_prompt(LiveSequences(examples), share)
    assert sorted(split.train + split.held_out) == list(range(len(examples)))
    return split


@quick
@given(prompts, st.floats(0.01, 0.6), st.data())
def test_a_prompt_is_never_on_both_sides(found, share, data):
    examples = [example(p, data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))) for p in found]
    try:
        split = sides(examples, share)
    except TrainingError:  # one prompt alone, or all of them below the line
        assume(False)
    held, train = ({tuple(found[i]) for i in side} for side in (split.held_out, split.train))
    assert not held & train
    assert held
    assert train


@quick
@given(st.integers(0, 40))
def test_more_data_moves_no_prompt_to_the_other_side(more):
    before = [example([i, i + 1, 7], [3, 4]) for i in range(60)]
    after = before + [example([i, 99, i], [3]) for i in range(more)]
    old, new = sides(before, 0.2), sides(after, 0.2)
    assert set(old.held_out) == {i for i in new.held_out if i < 60}


@quick
@given(prompts, st.lists(st.integers(1, 4), min_size=60, max_size=60), st.floats(0.1, 0.6))
def test_the_turns_of_a_conversation_stay_together(found, turns, share):
    """Each turn's prompt is another, so nothing but the conversation holds them together."""
    examples = [
        example([*prompt, *range(6, 6 + turn)], [3], conversation=number)
        for number, (prompt, count) in enumerate(zip(found, turns, strict=False))
        for turn in range(count)
    ]
    try:
        split = sides(examples, share)
    except TrainingError:
        assume(False)
    held, train = ({examples[i].conversation for i in side} for side in (split.held_out, split.train))
    assert not held & train
    # A dump remembers them.
    first = Examples("", tuple(examples)).provenance().first_of_conversation()
    live = LiveSequences(examples)
    assert list(first) == [live.first_of_conversation(i) for i in range(len(examples))]


def test_the_share_held_out_is_near_what_was_asked():
    split = sides([example([i, 5, i * 7], [1]) for i in range(2000)], 0.1)
    assert 0.08 < len(split.held_out) / 2000 < 0.12


def test_plain_text_is_its_own_prompt():
    texts = [example([], [i, 1, 2]) for i in range(100)]
    split = sides(texts, 0.2)
    assert 5 < len(split.held_out) < 40
    assert prompt_key(torch.tensor([1, 2]), torch.tensor([True, True])) != prompt_key(
        torch.tensor([1, 3]), torch.tensor([True, True])
    )


def test_one_prompt_cannot_be_divided():
    with pytest.raises(TrainingError, match="all 3 sequences have the same prompt"):
        sides([example([1, 2, 3], [i]) for i in range(3)], 0.1)


@quick
@given(st.lists(st.integers(0, 50), min_size=3, max_size=30), st.data())
def test_the_draft_vocabulary_is_the_best_covering_set(values, data):
    counts = torch.tensor(values)
    size = data.draw(st.integers(1, len(values)))
    chosen = choose_draft_vocabulary(counts, size)
    assert bool((chosen.token_ids.diff() > 0).all())
    assert len(chosen.token_ids) == size
    best = sum(sorted(values, reverse=True)[:size])
    assert int(counts[chosen.token_ids].sum()) == best
    assert chosen.coverage == pytest.approx(best / max(sum(values), 1))
    assert coverage(counts, chosen.token_ids) == chosen.coverage


def test_only_supervised_tokens_are_counted():
    source = LiveSequences([example([5, 5, 5], [1, 2]), example([4, 4], [2])])
    assert token_counts(source, (0, 1), 6).tolist() == [0, 1, 2, 0, 0, 0]
    assert token_counts(source, (1,), 6).tolist() == [0, 0, 1, 0, 0, 0]


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(TrainingError, match="draft vocabulary of 9 tokens is larger than the target's own 6"):
        choose_draft_vocabulary(torch.ones(6, dtype=torch.int64), 9)


def test_tokens_outside_the_vocabulary_are_refused():
    with pytest.raises(TrainingError, match="vocabulary has 4 tokens"):
        token_counts(LiveSequences([example([1, 9], [2])]), (0,), 4)
