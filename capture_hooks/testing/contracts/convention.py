"""The contract of a `Convention`: both directions agree, and whatever one of them cannot say it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from ...errors import ConventionError
from ...spec import Point

if TYPE_CHECKING:
    from ...conventions import Convention

_DEPTHS = (1, 2, 3, 5)


class ConventionContract:
    """Subclass and set `convention`.

    Every list of up to three ids, and every list of up to three points, is tried on small models.  What the
    ids mean cannot be known here: test that against your library, or a literal copy of its rule.
    """

    convention: Convention

    def test_it_says_what_it_is(self) -> None:
        """Reports and errors quote these."""
        for field in ("name", "library", "versions", "key", "source", "limits", "rank", "read_on", "order"):
            value = getattr(self.convention, field)
            assert isinstance(value, str), f"{field} is {value!r}, not text"
            assert value.strip(), f"{field} is empty"
        families = self.convention.families
        assert isinstance(families, tuple), "families is a tuple of model types"
        assert len(set(families)) == len(families), "a family is named twice"

    def test_ids_give_points_that_give_the_same_states(self) -> None:
        """``to_points(from_points(to_points(ids)))`` is ``to_points(ids)``; nothing is lost or invented."""
        for n, ids in _id_lists():
            points = self._points(ids, n)
            if points is None:
                continue
            assert len(points) == len(ids), f"{ids} for {n} layers: {len(points)} points from {len(ids)} ids"
            sites = _sites(points, n)
            assert len(set(sites)) == len(sites), f"{ids} for {n} layers: two points are one state"
            again = self.convention.to_points(self.convention.from_points(points, n), n)
            assert _sites(again, n) == sites, f"{ids} for {n} layers: {points} came back as {again}"

    def test_points_give_ids_that_give_the_same_states_in_the_same_order(self) -> None:
        """``to_points(from_points(points))`` names what ``points`` names."""
        for n, points in _point_lists():
            ids = self._ids(points, n)
            if ids is None:
                continue
            assert all(type(number) is int for number in ids), f"{ids} are not plain integers"
            again = self.convention.to_points(ids, n)
            assert _sites(again, n) == _sites(points, n), f"{points} became {ids}, which mean {again}"

    def test_spelling_does_not_matter(self) -> None:
        """``pre.(k+1)`` and ``post.k`` are one state, and get one answer."""
        for n, points in _point_lists():
            respelled = [_respelled(point, n) for point in points]
            assert self._ids(points, n) == self._ids(respelled, n), f"{points} and {respelled}, {n} layers"

    def test_what_it_does_silently_is_told_apart_from_what_ids_mean(self) -> None:
        """``captured`` has no quirks exactly where ``to_points`` answers, and then the same states."""
        for n, ids in _id_lists():
            points = self._points(ids, n)
            try:
                captured = self.convention.captured(ids, n)
            except ConventionError as error:
                _check_message(error)
                captured = None
            meant = captured is not None and not captured.quirks
            assert meant == (points is not None), f"{ids} for {n} layers mean {points}, and give {captured}"
            if captured is not None and points is not None:
                assert _sites(captured.points, n) == _sites(points, n), f"{ids} for {n} layers"

    def test_impossible_requests_are_refused(self) -> None:
        """Nothing, and anything that is no layer, is a `ConventionError` and not a guess."""
        for ids in ([], [10**6], [-(10**6)], [True], [1.0], ["1"], [None]):
            assert self._points(ids, 5) is None, f"to_points took {ids!r}"  # type: ignore[arg-type]  # that is the point
        for points in ([], [Point.post(5)], [Point.pre(-6)], [Point.pre(1), Point.post(0)]):
            assert self._ids(points, 5) is None, f"from_points took {points}"

    def _points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...] | None:
        try:
            return self.convention.to_points(ids, n_layers)
        except ConventionError as error:
            _check_message(error)
            return None

    def _ids(self, points: Sequence[Point], n_layers: int) -> list[int] | None:
        try:
            return self.convention.from_points(points, n_layers)
        except ConventionError as error:
            _check_message(error)
            return None


def _check_message(error: ConventionError) -> None:
    assert len(str(error)) > 20, f"the refusal {str(error)!r} does not say why"


def _sites(points: Sequence[Point], n: int) -> list[object]:
    return [point.resolve(n) for point in points]


def _respelled(point: Point, n: int) -> Point:
    boundary = point.resolve(n).boundary
    if boundary is None or (point.layer is None and point.kind != "embed"):
        return point
    return Point.pre(boundary) if boundary < n else Point.post(-1)


def _id_lists() -> Iterator[tuple[int, list[int]]]:
    for n in _DEPTHS:
        for length in (1, 2, 3):
            for ids in product(range(-1, n + 2), repeat=length):
                yield n, list(ids)


def _point_lists() -> Iterator[tuple[int, list[Point]]]:
    for n in _DEPTHS:
        every = [Point("embed"), *(Point.post(k) for k in range(n)), Point("final_norm")]
        for length in (1, 2, 3):
            for points in product(every, repeat=length):
                yield n, list(points)
