"""speculators' conventions against speculators 0.9: its check of ids, and its split of a dump."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer, PeerError

from capture_hooks.conventions import BUILTIN, convention_for
from capture_hooks.errors import ConventionError


@pytest.fixture(scope="module")
def speculators() -> Iterator[Peer]:
    peer = Peer("speculators", "speculators_ids")
    yield peer
    peer.close()


def inputs(speculators, ids, n):
    """The boundaries that the head is trained on, or None where the run fails.

    Between the check and the reader stands vLLM, which is told the ids and n and writes them by depth
    (``test_vllm_ids``); a head takes as many inputs as it has ids.
    """
    try:
        accepted = speculators("resolved", ids, n)
    except PeerError as error:
        assert error.kind == "ValueError"  # noqa: PT017
        return None
    found, last = speculators("split", sorted({*accepted, n}))
    assert last == n
    return found if len(found) == len(accepted) else None


@pytest.mark.parametrize("name", ["speculators", "speculators.dflash"])
@settings(deadline=None, max_examples=150)
@given(data=st.data(), n=st.integers(1, 12))
def test_what_is_trained_on_is_what_the_convention_says(speculators, name, data, n):
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(-2, n + 2), min_size=1, max_size=5),
            st.lists(st.integers(0, n - 1), min_size=1, max_size=4, unique=True).map(sorted),
        )
    )
    theirs = inputs(speculators, ids, n)
    try:
        captured = BUILTIN[name].captured(ids, n)
    except ConventionError:
        assert theirs is None
        return
    assert [point.resolve(n).boundary for point in captured.points] == theirs
    assert (captured.quirks == ()) == (sorted(ids) == ids)
    if captured.quirks:
        return
    assert BUILTIN[name].to_points(ids, n) == captured.points
    assert BUILTIN[name].from_points(captured.points, n) == ids


@pytest.mark.parametrize("n", range(1, 12))
def test_the_default(speculators, n):
    theirs = inputs(speculators, None, n)
    try:
        captured = BUILTIN["speculators"].default(n)
    except ConventionError:
        assert theirs is None
    else:
        assert [point.resolve(n).boundary for point in captured.points] == theirs


def test_the_old_generator_means_one_layer_deeper_than_the_config_that_it_trains():
    n = 36
    dumped = BUILTIN["speculators.generator"].default(n).points
    served = convention_for("speculators", "llama").default(n).points
    assert [point.resolve(n).boundary for point in dumped] == [3, 19, 34, 36]
    assert [point.resolve(n).boundary for point in served] == [2, 18, 33]
