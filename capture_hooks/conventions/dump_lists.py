"""Lists for a dump whose last slot is no input of the head, but the state that its logits come from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from ..spec import Point
from .contract import Captured, Order
from .read.table import TableConvention


class ListWithLast(TableConvention):
    """The states of a dump by depth, each once; a consumer splits the deepest one off.

    Points of the list are all its slots.  A list is only taken where its deepest slot is the right one.
    """

    order: ClassVar[Order] = "depth"
    twice: ClassVar[Literal["kept", "once", "fails"]] = "once"

    @abstractmethod
    def last(self, n_layers: int) -> int:
        """The id that must come last."""

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """See `Convention.to_points`; the last one is no input."""
        found = super().to_points(ids, n_layers)
        if ids[-1] != self.last(n_layers):
            self._refuse(ids, n_layers, self._mistaken(found[-1], n_layers))
        return found

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """See `Convention.from_points`; the points must include the last one."""
        found = super().from_points(points, n_layers)
        if found[-1] != self.last(n_layers):
            self._refuse(points, n_layers, self._mistaken(points[-1], n_layers))
        return found

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """See `Convention.captured`."""
        found = super().captured(ids, n_layers)
        if found.points[-1] == self.states(n_layers)[self.last(n_layers)]:
            return found
        return Captured(found.points, (*found.quirks, self._mistaken(found.points[-1], n_layers)))

    def _mistaken(self, point: Point, n_layers: int) -> str:
        return f"the last slot, {point}, is taken for the last state, id {self.last(n_layers)}"
