"""What holds for every convention that is installed, whatever its library does with the numbers."""

import inspect
from datetime import date
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import capture_hooks.conventions as package
from capture_hooks import CaptureSpec, Point
from capture_hooks.conventions import Captured, Convention, convention_for, meanings, require_verified
from capture_hooks.conventions.lookup import in_force, meaning
from capture_hooks.conventions.versions import Versions
from capture_hooks.errors import ConventionError
from capture_hooks.plugins import build_registry

TESTS = Path(__file__).parents[1]
INSTALLED = dict(build_registry(entry_points=()).conventions)
names = pytest.mark.parametrize("name", sorted(INSTALLED))

layers = st.integers(1, 200)
#: Plausible lists for a model of any depth, short ones around its edges, and anything at all.
plausible = st.tuples(layers, st.randoms(use_true_random=False)).map(
    lambda pair: (pair[0], sorted(pair[1].sample(range(pair[0] + 1), min(3, pair[0]))))
)
around_the_edges = layers.flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.one_of(st.integers(-3, 3), st.integers(n - 3, n + 2)), min_size=1, max_size=4),
    )
)
anything = st.tuples(
    layers,
    st.lists(
        st.one_of(
            st.integers(),
            st.integers(-300, 300),
            st.booleans(),
            st.none(),
            st.text(max_size=3),
            st.floats(),
            st.lists(st.integers(0, 5), max_size=2),
        ),
        max_size=6,
    ),
)
requests = st.one_of(plausible, around_the_edges, anything)


def sites(points: Any, n: int) -> list[object]:
    return [point.resolve(n) for point in points]


def answer(question: Any, *arguments: Any) -> Any:
    """What it answers; None for a refusal, which has to say why.  Any other exception is a failure."""
    try:
        return question(*arguments)
    except ConventionError as error:
        refusal = str(error)
    assert len(refusal) > 20
    return None


@names
@settings(deadline=None, max_examples=40)
@given(request=requests)
def test_reading_ids_is_total_and_keeps_meaning_apart_from_what_happens(
    name: str, request: tuple[int, list[Any]]
) -> None:
    n, ids = request
    points = answer(INSTALLED[name].to_points, ids, n)
    captured = answer(INSTALLED[name].captured, ids, n)
    meant = captured is not None and not captured.quirks
    assert meant == (points is not None), (ids, n, points, captured)
    if points is not None:
        assert sites(points, n) == sites(captured.points, n)
        assert len(points) == len(ids) == len(set(sites(points, n)))
        assert INSTALLED[name].count in (None, len(points))
    if captured is not None:
        assert all(quirk.strip() == quirk and len(quirk) > 10 for quirk in captured.quirks)
        sites(captured.points, n)  # each lies inside the model, or this raises


@names
@settings(deadline=None, max_examples=40)
@given(request=requests)
def test_ids_give_points_that_give_ids_of_the_same_states(name: str, request: tuple[int, list[Any]]) -> None:
    n, ids = request
    points = answer(INSTALLED[name].to_points, ids, n)
    if points is None:
        return
    again = INSTALLED[name].from_points(points, n)
    assert all(type(number) is int for number in again)
    assert sites(INSTALLED[name].to_points(again, n), n) == sites(points, n)


def of_depth(n: int) -> st.SearchStrategy[tuple[int, list[Point]]]:
    layer = st.integers(-n, n - 1)
    point = st.one_of(
        st.just(Point("embed")),
        st.just(Point("final_norm")),
        layer.map(Point.pre),
        layer.map(Point.post),
        st.just(Point("out", module="model.layers.0.mlp")),
        st.integers(n, n + 3).map(Point.post),
    )
    by_depth = st.sets(st.integers(0, n), min_size=1, max_size=4).map(
        lambda found: [Point("embed") if k == 0 else Point.post(k - 1) for k in sorted(found)]
    )
    return st.tuples(st.just(n), st.one_of(by_depth, st.lists(point, max_size=5)))


@names
@settings(deadline=None, max_examples=40)
@given(request=layers.flatmap(of_depth))
def test_points_give_ids_that_give_these_points(name: str, request: tuple[int, list[Point]]) -> None:
    n, points = request
    ids = answer(INSTALLED[name].from_points, points, n)
    if ids is None:
        return
    back = INSTALLED[name].to_points(ids, n)
    assert sites(back, n) == sites(points, n)
    assert CaptureSpec(tuple(points)).resolve(n) == CaptureSpec(back).resolve(n)
    assert INSTALLED[name].captured(ids, n) == Captured(back)


@names
def test_the_default_lies_inside_the_model(name: str) -> None:
    for n in [*range(1, 30), 36, 61, 126, 200]:
        found = answer(INSTALLED[name].default, n)
        if found is not None:
            sites(found.points, n)
            assert n < 7 or len(found.points) >= 3, f"EAGLE's default is three states, and not {found} ({n})"


@names
@settings(deadline=None, max_examples=40)
@given(request=requests)
def test_states_come_out_in_the_order_that_is_stated(name: str, request: tuple[int, list[Any]]) -> None:
    n, ids = request
    captured = answer(INSTALLED[name].captured, ids, n)
    if captured is None or INSTALLED[name].order != "depth":
        return
    depths = [site.boundary for point in captured.points if (site := point.resolve(n)).boundary is not None]
    assert depths == sorted(depths), (ids, n)


@names
def test_each_says_what_it_is_and_where_that_was_learnt(name: str) -> None:
    found = INSTALLED[name]
    for field in ("name", "library", "versions", "key", "source", "limits"):
        assert getattr(found, field).strip(), f"it does not state its {field}"
    assert found.name == name
    assert found.limits.rstrip().endswith("."), "limits is no sentence"
    assert found.rank in ("verified", "read")
    assert found.order in ("depth", "listed")
    assert date(2026, 11, 1) <= date.fromisoformat(found.read_on) <= date.today()
    assert len(set(found.families)) == len(found.families)


def test_no_family_has_two_meanings_in_one_version() -> None:
    claimed: dict[tuple[str, str, str], list[Convention]] = {}
    for found in INSTALLED.values():
        for family in found.families or ("every other",):
            claimed.setdefault((found.library, found.key, family), []).append(found)
    for (*_, family), several in claimed.items():
        for one, other in combinations(several, 2):
            first, second = Versions.parse(one.versions), Versions.parse(other.versions)
            assert _apart(first, second) or _apart(second, first), f"{one.name}, {other.name}: {family}"


def _apart(earlier: Versions, later: Versions) -> bool:
    return earlier.last is not None and later.first is not None and earlier.last < later.first


def test_every_library_has_one_primary_key() -> None:
    for library in sorted({found.library for found in INSTALLED.values()}):
        keys = {c.key for c in INSTALLED.values() if c.library == library and c.primary}
        assert len(keys) == 1, f"{library}: {sorted(keys)}"
        for key in {c.key for c in INSTALLED.values() if c.library == library}:
            flags = {c.primary for c in INSTALLED.values() if (c.library, c.key) == (library, key)}
            assert len(flags) == 1, f"{library}, {key}: some are primary and some are not"


@names
def test_each_is_found_by_its_library_family_key_and_version(name: str) -> None:
    found = INSTALLED[name]
    version = Versions.parse(found.versions).last
    assert version is not None
    for family in found.families or ("a family that nobody has",):
        spoken_for = ".".join(map(str, version))
        assert convention_for(found.library, family, found.key, spoken_for) == found, family


@names
def test_each_is_run_by_a_test_or_says_that_it_was_only_read(name: str) -> None:
    found = INSTALLED[name]
    require_verified(found, accept_unverified=True)
    if found.rank == "verified":
        require_verified(found, accept_unverified=False)
        running = [
            *TESTS.glob(f"interop/test_{found.library}*.py"),
            *TESTS.glob(f"conventions/test_{found.library}*.py"),
        ]
        assert running, f"no test runs {found.library}"
    else:
        with pytest.raises(ConventionError, match=r"read from its source on 2026-.*--accept-unverified"):
            require_verified(found, accept_unverified=False)


@settings(deadline=None, max_examples=100)
@given(
    request=requests,
    family=st.one_of(st.text(max_size=12), st.sampled_from(["llama", "kimi_k25", "gpt_oss"])),
)
def test_every_library_answers_any_question(request: tuple[int, list[Any]], family: str) -> None:
    n, ids = request
    found = meanings(ids, family, n)
    libraries = [one.convention.library for one in found]
    assert libraries == sorted({c.library for c in in_force() if _covers(c.library, family)})
    for one in found:
        assert (one.points is None) == (one.refusal is not None)
        assert one == meaning(one.convention, ids, n)


def _covers(library: str, family: str) -> bool:
    return any(
        c.library == library and c.primary and (family in c.families or not c.families) for c in in_force()
    )


def test_no_public_function_takes_ids_without_a_convention_or_a_library() -> None:
    """An integer without its convention cannot be asked about: each function that takes ids names whose."""
    for name in package.__all__:
        thing = getattr(package, name)
        if not inspect.isfunction(thing):
            continue
        parameters = set(inspect.signature(thing).parameters)
        if parameters & {"ids", "points"} and name != "meanings":  # which answers for each library apart
            assert parameters & {"library", "chosen"}, f"{name}{inspect.signature(thing)}"
    for method in (Convention.to_points, Convention.captured):
        assert "self" in inspect.signature(method).parameters
