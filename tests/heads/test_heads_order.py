"""Inputs on disk stand in ascending depth."""

from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.heads.config import depth_order, in_order
from capture_hooks.spec import CaptureSpec, Point

LAYERS = 9
POINTS = [Point("embed"), *map(Point.pre, range(1, LAYERS)), Point.post(LAYERS - 1), Point("final_norm")]


@given(st.permutations(POINTS), st.integers(1, len(POINTS)))
@settings(deadline=None, max_examples=60)
def test_any_choice_in_any_order_is_sorted_by_depth(points, count):
    spec = CaptureSpec(tuple(points[:count]))
    order = depth_order(spec, LAYERS)
    assert sorted(order) == list(range(count))
    assert in_order(spec, order) == tuple(sorted(points[:count], key=POINTS.index))


def test_module_points_come_last_and_keep_their_order():
    spec = CaptureSpec.parse("out:b.mlp, final_norm, in:a.mlp, pre.0")
    assert [str(p) for p in in_order(spec, depth_order(spec, 4))] == [
        "pre.0",
        "final_norm",
        "out:b.mlp",
        "in:a.mlp",
    ]


def test_where_layers_are_split_the_output_comes_before_the_next_input():
    spec = CaptureSpec.parse("pre.3, post.2, pre.1")
    assert depth_order(spec, 6) == (2, 1, 0)
