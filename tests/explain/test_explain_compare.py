"""Differences between what is fed and what was trained on, by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.interop.explain.compare import differences, one_spelling, state_of
from capture_hooks.spec import Point
from capture_hooks.testing.strategies import points

N = 12


def parsed(text):
    return [Point.parse(word) for word in text.split(",")] if text else []


@pytest.mark.parametrize(
    ("trained", "fed", "words"),
    [
        ("post.1, post.5, post.8", "pre.1, pre.5, pre.8", ["every state is one layer earlier"]),
        ("post.1, post.5, post.8", "post.2, post.6, post.9", ["every state is one layer deeper"]),
        ("post.1, post.5, post.8", "post.4, post.8, post.11", ["every state is 3 layers deeper"]),
        (
            "post.8, post.1",
            "post.1, post.8",
            ["order permuted", "fed post.1, post.8, trained on post.8, post.1"],
        ),
        ("post.1, post.5, post.8", "post.1, post.8", ["1 of 3 states missing", "post.5 is not captured"]),
        (
            "post.1, post.5, post.10",
            "post.2, post.6",
            ["one layer deeper", "nothing is captured for post.10"],
        ),
        ("post.1", "post.1, post.8", ["1 states too many", "post.8"]),
        (
            "post.1, post.5",
            "post.1, final_norm",
            ["slot 1", "normed, and the head was trained on the un-normed"],
        ),
        (
            "post.1, final_norm",
            "post.1, post.11",
            ["slot 1", "un-normed, and the head was trained on the normed"],
        ),
        ("embed, post.5", "post.1, post.5", ["slot 0", "no embedding is fed"]),
        ("post.1, post.5", "embed, post.5", ["slot 0", "the embedding is fed"]),
        ("post.1, post.5", "post.1, post.7", ["slot 1: post.7, trained on post.5 (2 layers deeper)"]),
    ],
)
def test_a_difference_has_its_name(trained, fed, words):
    said = "; ".join(differences(parsed(trained), parsed(fed), N))
    for word in words:
        assert word in said


def test_at_a_split_boundary_the_two_sides_differ():
    assert not differences(parsed("post.1"), parsed("pre.2"), N)
    (said,) = differences(parsed("post.1, post.5"), parsed("pre.2, post.5"), N, split={2})
    assert "adds something between" in said


@given(st.lists(points(N), max_size=5), st.lists(points(N), max_size=5))
def test_nothing_is_said_exactly_where_the_states_are_the_same(trained, fed):
    same = [p.resolve(N) for p in trained] == [p.resolve(N) for p in fed]
    assert (differences(trained, fed, N) == ()) == same


@given(points(N))
def test_one_spelling_keeps_the_state(point):
    spelled = one_spelling(point, N)
    assert spelled.resolve(N) == point.resolve(N)
    assert spelled.kind != "pre"
    assert Point.parse(state_of(point, N).point).resolve(N) == point.resolve(N)
    assert (state_of(point, N).norm == "normed") == (point.kind == "final_norm")
