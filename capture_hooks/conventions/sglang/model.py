"""What an SGLang model does with the layers that it is told to capture, well-formed or not.

Two steps of SGLang's decide what comes out.  The model's setter turns ids into *boundaries* ("capture what
enters layer i") and stores them, as a list, or as a mark on each ``self.layers[i]``.  Its forward visits the
layers in order and keeps the stream wherever the list or the mark says so; some models look once more after
their last layer.  So states come out by depth, each once, and what is not visited is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from ...spec import Point
from ..boundaries import BoundaryConvention
from ..contract import Captured, Rank

#: How a model remembers boundaries: in a *list* that its loop asks, or by *marks* on its layers, where an
#: index out of range fails and a negative one counts from the end; *both*: it sets marks, and asks the list.
Memory = Literal["list", "marks", "both"]


class SglangModel(BoundaryConvention):
    """Ids that a setter of SGLang's turns into boundaries, and the loop that captures them."""

    library: ClassVar[str] = "sglang"
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-30"

    outside: ClassVar[str] = "these models capture by no id"
    memory: ClassVar[Memory] = "list"
    #: Whether it looks once more after its last layer, so that boundary n is captured.
    end: ClassVar[bool] = False
    #: Whether boundary 0 is captured; False where the loop adds a residual that layer 0 does not have yet.
    embedding: ClassVar[bool] = True
    #: Whether the states must be as many as the ids: they are packed into a buffer of that width.
    packed: ClassVar[bool] = False
    #: Whether a forward that captured nothing goes on, so that the head is fed what ``lm_head`` is fed.
    goes_on: ClassVar[bool] = False
    #: Whether the same state is spelled ``pre.k``: what is added between the layers is in it.
    entering: ClassVar[bool] = False

    def lowest(self, n_layers: int) -> int:
        # Boundary 0 would be id -1: it works by accident, and nothing validates it.
        return 1

    def highest(self, n_layers: int) -> int:
        return n_layers if self.end else n_layers - 1

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return [number + 1 for number in ids]

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        return [boundary - 1 for boundary in boundaries]

    def point(self, boundary: int, n_layers: int) -> Point:
        if self.entering and 0 < boundary < n_layers:
            return Point.pre(boundary)
        return super().point(boundary, n_layers)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `Convention.captured`, by what the setter and the loop do with any list, numbers or not."""
        try:
            found = self.boundaries(ids, n_layers)
        except TypeError as error:
            self._refuse(ids, n_layers, f"its setter fails, TypeError: {error}")
        quirks = [
            f"id {number!r} is no integer, and counts as {int(number)}"
            for number, boundary in zip(ids, found, strict=True)
            if type(number) is not int and boundary in range(-n_layers, n_layers + 2)
        ]
        quirks += [
            f"id {number} is negative and happens to be boundary {boundary % n_layers}"
            for number, boundary in zip(ids, found, strict=True)
            if isinstance(number, int) and number < 0 and self._sees(boundary, n_layers)
        ]
        named = zip((f"id {number}" for number in ids), found, strict=True)
        return self._visited(ids, list(named), n_layers, quirks)

    def _visited(
        self,
        request: Sequence[object],
        asked: Sequence[tuple[str, int]],
        n_layers: int,
        quirks: Iterable[str],
    ) -> Captured:
        """The states that come out for boundaries that were ``asked``, each with what it is called."""
        quirks, kept = list(quirks), list[int]()
        for name, boundary in asked:
            self._remember(request, name, boundary, n_layers)
            if not self._sees(boundary, n_layers):
                quirks.append(f"{name} is boundary {boundary}, which {self.outside}: left out")
                continue
            seen = self._seen(boundary, n_layers)
            if seen == 0 and not self.embedding:
                self._refuse(
                    request,
                    n_layers,
                    f"{name} is boundary 0, where it adds a residual that is None: TypeError",
                )
            if seen in kept:
                quirks.append(f"{name} names a state that is captured already: captured once")
            else:
                kept.append(seen)
        if kept and self.packed and len(kept) < len(asked):
            why = f"captured {len(kept)} of {len(asked)} aux hidden states"
            self._refuse(request, n_layers, f"its forward fails, RuntimeError: {why} ({'; '.join(quirks)})")
        if not kept:
            return self._nothing(request, n_layers, quirks)
        if kept != sorted(kept):
            quirks.append("the states are concatenated by depth, not in the order of the ids")
        return Captured(tuple(self.point(boundary, n_layers) for boundary in sorted(kept)), tuple(quirks))

    def _remember(self, request: Sequence[object], name: str, boundary: int, n_layers: int) -> None:
        if self.memory == "list":
            return
        if not isinstance(boundary, int):
            self._refuse(request, n_layers, f"{name} marks self.layers[{boundary}], a TypeError")
        if not -n_layers <= boundary < n_layers:
            self._refuse(request, n_layers, f"{name} marks self.layers[{boundary}], an IndexError")

    def _sees(self, boundary: int, n_layers: int) -> bool:
        if self.memory == "marks":
            return True
        # `in` asks for equality, as the library's own `i in self.layers_to_capture` does.
        return boundary in range(self.highest(n_layers) + 1)

    def _seen(self, boundary: int, n_layers: int) -> int:
        return int(boundary) % n_layers if self.memory == "marks" else int(boundary)

    def _nothing(self, request: Sequence[object], n_layers: int, quirks: list[str]) -> Captured:
        if not self.goes_on:
            why = "; ".join(quirks) or "there are no ids"
            self._refuse(
                request, n_layers, f"nothing is captured, and its forward fails to unpack the pair ({why})"
            )
        quirks.append("nothing is captured, and the head is fed what lm_head is fed")
        return Captured((Point("final_norm"),), tuple(quirks))
