from collections import Counter
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.training.sampler import (
    TokenBudgetSampler,
    global_batches,
    in_order,
    shuffled,
    split,
    steps_for,
)

BUDGET = 50
lengths = st.lists(st.integers(3, BUDGET), min_size=1, max_size=80)
quick = settings(max_examples=50, deadline=None)


@quick
@given(lengths, st.integers(0, 5))
def test_every_pass_visits_each_sequence_once(sizes, seed):
    wanted = 3 * len(sizes)
    seen = []
    for batch in global_batches(sizes, BUDGET, seed):
        assert 0 < sum(sizes[i] for i in batch) <= BUDGET
        seen += batch
        if len(seen) >= wanted + 80:
            break
    # A sequence may wait for a later batch, but none is taken a fourth time before all waited for are gone.
    counts = Counter(seen)
    assert len(counts) == len(sizes)
    assert min(counts.values()) >= 2


@quick
@given(st.integers(1, 30), st.integers(0, 3))
def test_equal_lengths_are_visited_in_the_order_of_the_shuffle(size, seed):
    batches = global_batches([BUDGET] * size, BUDGET, seed)
    assert list(islice(batches, 2 * size)) == [[i] for epoch in (0, 1) for i in shuffled(size, seed, epoch)]


@quick
@given(lengths, st.integers(1, 6), st.integers(0, 3))
def test_a_batch_is_divided_completely_and_evenly(sizes, parts, seed):
    batch = next(global_batches(sizes, BUDGET, seed, at_least=parts))
    shares = split(batch, sizes, parts)
    assert sorted(i for share in shares for i in share) == sorted(batch)
    assert all(shares)
    loads = [sum(sizes[i] for i in share) for share in shares]
    # Longest first onto the emptiest: no share exceeds another by more than its own last sequence.
    assert all(load - sizes[share[-1]] <= min(loads) for load, share in zip(loads, shares, strict=True))


@quick
@given(lengths, st.integers(1, 3), st.integers(1, 3), st.integers(0, 3))
def test_processes_share_what_one_process_accumulates(sizes, processes, accumulate, seed):
    def sampler(accumulate, processes, process):
        return list(
            TokenBudgetSampler(
                sizes, BUDGET, steps=4, seed=seed, accumulate=accumulate, processes=processes, process=process
            )
        )

    alone = sampler(accumulate * processes, 1, 0)
    together = [sampler(accumulate, processes, p) for p in range(processes)]
    for step in range(4):
        one = alone[step * accumulate * processes : (step + 1) * accumulate * processes]
        many = [share for own in together for share in own[step * accumulate : (step + 1) * accumulate]]
        assert sorted(one) == sorted(many)


def test_the_stream_depends_on_the_seed_alone():
    sizes = list(range(3, 40))
    first, again, other = (list(islice(global_batches(sizes, BUDGET, seed), 20)) for seed in (1, 1, 2))
    assert first == again != other


@quick
@given(lengths, st.floats(0.1, 3), st.integers(0, 3))
def test_steps_for_sees_that_many_passes(sizes, epochs, seed):
    steps = steps_for(sizes, BUDGET, seed, epochs)
    seen = [len(batch) for batch in islice(global_batches(sizes, BUDGET, seed), steps)]
    assert sum(seen) >= epochs * len(sizes) > sum(seen[:-1])


@quick
@given(lengths)
def test_evaluation_takes_every_sequence_once_in_order(sizes):
    batches = in_order(sizes, BUDGET)
    assert [i for batch in batches for i in batch] == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in batch) <= BUDGET for batch in batches)
