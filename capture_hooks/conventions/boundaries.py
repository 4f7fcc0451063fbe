"""The common part of conventions whose ids number boundaries of the residual stream.

All engines that serve draft heads capture while the layers run: whatever the order of the ids, states
come out by ascending depth, and an id that is written twice is captured once.  A list for which that
makes a difference is refused here, because the head would be fed other columns than its ``fc`` expects.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ..errors import ConventionError, SpecError
from ..spec import Point
from .contract import Captured, Convention, Order


class BoundaryConvention(Convention):
    """Ascending, distinct ids, each naming one boundary from `lowest` to `highest`."""

    order: ClassVar[Order] = "depth"
    #: What the library does with a boundary outside its range, after "which".
    outside: ClassVar[str]

    def lowest(self, n_layers: int) -> int:
        """The first boundary it captures; 0 is the embedding."""
        return 0

    @abstractmethod
    def highest(self, n_layers: int) -> int:
        """The last boundary it captures; ``n_layers`` is the un-normed end."""

    @abstractmethod
    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        """The boundary that each id names, in range or not."""

    @abstractmethod
    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        """The inverse, for boundaries in range.

        Raises:
            ConventionError: where a heuristic of the library would read the ids as something else.
        """

    def point(self, boundary: int, n_layers: int) -> Point:
        """The boundary in the words of this library: here, the output of a layer."""
        return Point("embed") if boundary == 0 else Point.post(boundary - 1)

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """See `Convention.to_points`."""
        checked = self._checked_ids(ids, n_layers)
        found = self.boundaries(checked, n_layers)
        for number, boundary in zip(checked, found, strict=True):
            if not self.lowest(n_layers) <= boundary <= self.highest(n_layers):
                self._refuse(ids, n_layers, f"id {number} is boundary {boundary}, which {self.outside}")
        return tuple(self.point(boundary, n_layers) for boundary in found)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """See `Convention.from_points`."""
        wanted = [self._boundary(point, points, n_layers) for point in points]
        if not wanted:
            self._refuse(points, n_layers, "there are no points")
        first_at: dict[int, Point] = {}
        for point, boundary in zip(points, wanted, strict=True):
            if boundary in first_at:
                self._refuse(
                    points, n_layers, f"{first_at[boundary]} and {point} are one state, captured once"
                )
            if self.order == "depth" and any(boundary < before for before in first_at):
                self._refuse(
                    points,
                    n_layers,
                    f"{point} comes after a deeper point, and the states are always concatenated by depth; "
                    "order the points by depth, and permute the head's fc columns along",
                )
            first_at[boundary] = point
        return self.ids(wanted, n_layers)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `Convention.captured`: a boundary out of range is left out, one named twice captured once."""
        found = self.boundaries(self._integers(ids, n_layers), n_layers)
        quirks, kept = [], []
        for number, boundary in zip(ids, found, strict=True):
            if not self.lowest(n_layers) <= boundary <= self.highest(n_layers):
                quirks.append(f"id {number} is boundary {boundary}, which {self.outside}: left out")
            elif self.order == "depth" and boundary in kept:
                quirks.append(f"id {number} names a state that is captured already: captured once")
            else:
                kept.append(boundary)
                if number < 0:
                    quirks.append(f"id {number} is negative and happens to be boundary {boundary}")
        if self.order == "depth" and kept != sorted(kept):
            quirks.append("the states are concatenated by depth, not in the order of the ids")
            kept.sort()
        return Captured(tuple(self.point(boundary, n_layers) for boundary in kept), tuple(quirks))

    def default(self, n_layers: int) -> Captured:
        """As `Convention.default`: EAGLE's own three layers, as far as the model is deep enough."""
        return eagle_default(self, n_layers)

    def _boundary(self, point: Point, points: Sequence[Point], n_layers: int) -> int:
        try:
            site = point.resolve(n_layers)
        except SpecError as error:
            raise ConventionError(f"{self.name}: {error}") from None
        if site.boundary is None:
            what = "the output of a norm" if site.norm else "a module's value"
            self._refuse(points, n_layers, f"{point} is {what}, and its ids name the residual stream only")
        if not self.lowest(n_layers) <= site.boundary <= self.highest(n_layers):
            self._refuse(points, n_layers, f"{point} is boundary {site.boundary}, which {self.outside}")
        return site.boundary

    def _checked_ids(self, ids: Sequence[int], n_layers: int) -> list[int]:
        self._integers(ids, n_layers)
        for number in ids:
            if number < 0:
                self._refuse(ids, n_layers, f"{number} is negative, and no id counts from the end")
        if len(set(ids)) < len(ids):
            twice = next(number for number in ids if list(ids).count(number) > 1)
            self._refuse(ids, n_layers, f"{twice} stands there twice and would be captured once")
        if self.order == "depth" and sorted(ids) != list(ids):
            self._refuse(
                ids,
                n_layers,
                "they do not ascend, and the states are always concatenated by depth; "
                "sort the ids, and permute the head's fc columns along",
            )
        return list(ids)

    def _integers(self, ids: Sequence[int], n_layers: int) -> list[int]:
        for number in ids:
            if type(number) is not int:  # a bool would count as 0 or 1
                self._refuse(ids, n_layers, f"{number!r} is not an integer")
        if not ids:
            self._refuse(ids, n_layers, "there are no ids")
        return list(ids)

    def _refuse(self, request: Sequence[object], n_layers: int, why: str) -> NoReturn:
        shown = f"[{', '.join(str(item) for item in request)}]"
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}, {self.key}): cannot take {shown} "
            f"for a model of {n_layers} layers: {why}"
        )


def eagle_default(convention: Convention, n_layers: int, shift: int = 0) -> Captured:
    """EAGLE's layers, the inputs of 2, n//2 and n-3 (``shift`` deeper), as ``convention`` spells points.

    SafeAILab/EAGLE cb7e084, ``eagle/model/modeling_llama_kv.py:1138``; below seven layers some coincide.
    """
    wanted = [2 + shift, n_layers // 2 + shift, n_layers - 3 + shift]
    kept = sorted({boundary for boundary in wanted if 0 < boundary <= n_layers})
    quirks: tuple[str, ...] = ("no ids are given: it takes its default layers",)
    if len(kept) < len(wanted):
        quirks += (f"in a model of {n_layers} layers only {len(kept)} of the default's three are there",)
    if isinstance(convention, BoundaryConvention):
        reach = range(convention.lowest(n_layers), convention.highest(n_layers) + 1)
        return Captured(tuple(convention.point(k, n_layers) for k in kept if k in reach), quirks)
    return Captured(tuple(Point.post(k - 1) for k in kept), quirks)
