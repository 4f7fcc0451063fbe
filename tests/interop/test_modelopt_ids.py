"""ModelOpt's convention against ModelOpt 0.47: its hooks on tiny random models, its default."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer, PeerError

from capture_hooks.conventions import BUILTIN
from capture_hooks.conventions.rules import DEFAULTS
from capture_hooks.errors import ConventionError


@pytest.fixture(scope="module")
def modelopt() -> Iterator[Peer]:
    peer = Peer("modelopt", "modelopt_ids")
    yield peer
    peer.close()


def theirs(modelopt, ids, n):
    try:
        return modelopt("captured", ids, n)
    except PeerError as error:
        if error.kind not in ("RuntimeError", "ValueError"):  # the width of fc, or nothing to concatenate
            raise
        return None


def boundaries(captured, n):
    return [point.resolve(n).boundary for point in captured.points]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), n=st.integers(1, 8))
def test_what_the_hooks_collect_is_what_the_convention_says(modelopt, data, n):
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(-2, n + 1), min_size=1, max_size=4),
            st.lists(st.integers(0, n - 1), min_size=1, max_size=4, unique=True).map(sorted),
        )
    )
    peer = theirs(modelopt, ids, n)
    try:
        captured = BUILTIN["modelopt"].captured(ids, n)
    except ConventionError:
        assert peer is None
        return
    assert boundaries(captured, n) == peer
    assert (captured.quirks == ()) == (sorted(ids) == ids)
    if captured.quirks:
        return
    assert BUILTIN["modelopt"].to_points(ids, n) == captured.points
    assert BUILTIN["modelopt"].from_points(captured.points, n) == ids


@pytest.mark.parametrize("n", range(1, 13))
def test_the_default(modelopt, n):
    assert modelopt("default_eagle_aux_layer_ids", n) == DEFAULTS["modelopt"](n)
    peer = theirs(modelopt, [], n)
    try:
        captured = BUILTIN["modelopt"].default(n)
    except ConventionError:
        assert peer is None
    else:
        assert boundaries(captured, n) == peer


@settings(deadline=None)
@given(data=st.data(), n=st.integers(3, 40))
def test_one_list_for_its_dumps_is_two_lists_of_states(data, n):
    ids = data.draw(st.lists(st.integers(1, n - 2), min_size=1, max_size=4, unique=True).map(sorted))
    hooks, hf, trt, vllm = (
        boundaries(BUILTIN[name].captured(ids, n), n)
        for name in ("modelopt", "modelopt.hf_dump", "modelopt.trt_dump", "modelopt.vllm_dump")
    )
    assert hooks == hf == trt == [boundary + 1 for boundary in vllm]
    streamed = BUILTIN["modelopt.streaming"].captured([*(k + 1 for k in ids), n], n)
    assert boundaries(streamed, n) == [*hooks, n]
    assert str(BUILTIN["modelopt.hf_dump"].captured([n - 1], n).points[0]) == "final_norm"
