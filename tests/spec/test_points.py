"""Points: text, order, and the boundary each one lies on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.errors import SpecError
from capture_hooks.spec import Point, Site
from capture_hooks.spec.points import ALLOWED_FORMS
from capture_hooks.testing.strategies import points

quick = settings(deadline=None, max_examples=50)


@quick
@given(points())
def test_text_reads_back(point: Point) -> None:
    assert Point.parse(str(point)) == point
    assert Point.parse(f"  {point}\t") == point


@quick
@given(points(), points())
def test_text_and_hash_tell_points_apart(a: Point, b: Point) -> None:
    assert (a == b) == (str(a) == str(b))
    assert a != b or hash(a) == hash(b)


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "post", "post.", "post.1.5", "post.+1", "post.--1", "post. 1", "post.1e3", "Post.1"),
        *("embed.0", "final_norm.1", "mid.3", "3", "-1", "in:", "out: ", "in:a b", "out:a,b", "in:.x"),
        *("post.१", "post.²", "embed ", "post.1\npost.2", "in:módulo"),
    ],
)
def test_other_text_is_refused_with_the_allowed_forms(text: str) -> None:
    if text.strip() == "embed":
        assert Point.parse(text) == Point("embed")
        return
    with pytest.raises(SpecError) as caught:
        Point.parse(text)
    assert repr(text) in str(caught.value)
    assert ALLOWED_FORMS in str(caught.value)


@quick
@given(st.text(max_size=12))
def test_parsing_any_text_gives_a_point_or_a_spec_error(text: str) -> None:
    try:
        point = Point.parse(text)
    except SpecError:
        return
    assert Point.parse(str(point)) == point


def test_a_number_too_long_to_be_a_layer_is_an_error_not_a_crash() -> None:
    with pytest.raises(SpecError, match="not a capture point"):
        Point.parse("post." + "9" * 5000)


def test_zero_padded_and_negative_zero_are_one_point() -> None:
    assert Point.parse("post.007") == Point.post(7)
    assert Point.parse("pre.-0") == Point.pre(0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "post"},
        {"kind": "embed", "layer": 0},
        {"kind": "in"},
        {"kind": "pre", "layer": 1, "module": "a"},
        {"kind": "mid", "layer": 1},
        {"kind": "pre", "layer": "1"},
        {"kind": "pre", "layer": True},
        {"kind": "pre", "layer": 1.0},
    ],
)
def test_a_point_that_text_cannot_say_cannot_be_built(arguments: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        Point(**arguments)  # type: ignore[arg-type]  # that is the point


@quick
@given(n=st.integers(1, 200), data=st.data())
def test_boundaries(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n - 1))
    assert Point.pre(k).resolve(n) == Site(boundary=k)
    assert Point.post(k).resolve(n) == Site(boundary=k + 1)
    assert Point.pre(k - n).resolve(n) == Point.pre(k).resolve(n)
    assert Point.post(k - n).absolute(n) == Point.post(k)
    assert Point("embed").resolve(n) == Point.pre(0).resolve(n)
    assert Point("final_norm").resolve(n) != Point.post(-1).resolve(n)


@quick
@given(n=st.integers(1, 60), beyond=st.integers(0, 1000), negative=st.booleans(), post=st.booleans())
def test_out_of_range_names_the_range(n: int, beyond: int, negative: bool, post: bool) -> None:
    layer = -n - 1 - beyond if negative else n + beyond
    point = Point.post(layer) if post else Point.pre(layer)
    with pytest.raises(SpecError) as caught:
        point.resolve(n)
    message = str(caught.value)
    assert str(point) in message
    assert f"a model of {n} layer" in message
    assert f"{point.kind}.{n - 1}" in message


@quick
@given(n=st.integers(2, 60), data=st.data())
def test_a_split_boundary_keeps_its_two_sides_apart(n: int, data: st.DataObject) -> None:
    """Where the model adds something between layers, leaving one is not entering the next."""
    k = data.draw(st.integers(0, n - 2))
    after, before = Point.post(k), Point.pre(k + 1)
    assert after.resolve(n) == before.resolve(n)
    assert after.resolve(n, split={k + 1}) != before.resolve(n, split={k + 1})
    assert after.resolve(n, split={k + 2}) == before.resolve(n, split={k + 2})


@quick
@given(point=points(12))
def test_points_of_a_model_resolve(point: Point) -> None:
    site = point.resolve(12)
    assert point.absolute(12).resolve(12) == site
    assert site.residual == (point.module is None)
