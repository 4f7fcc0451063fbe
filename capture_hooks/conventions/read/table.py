"""The common part of conventions that were read: a table of the ids that mean something.

Trainers index a list of states, so states come out in the ids' own order, and Python's indexing gives numbers
a meaning that nobody intended.  Each convention therefore says which ids stand for which state, and what else
a number outside that table happens to fetch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NoReturn

from ...errors import ConventionError, SpecError
from ...spec import Point, Site
from ..contract import Captured, Convention, Order, Rank

#: Why DFlash's default cannot be told from the target alone; see `spread`.
SPREAD = "without a list it takes as many layers as the draft has, evenly from 1 to n-3"


class TableConvention(Convention):
    """Ids of a library whose code was read and is not run by the tests."""

    rank: ClassVar[Rank] = "read"
    read_on: ClassVar[str] = "2026-11-30"
    families: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[Order] = "listed"
    #: What an id outside the table does, after "id 7"; where it happens to fetch a state, see `stray`.
    outside: ClassVar[str]
    #: What an id that is written twice does: both columns are there, one is, or the library fails.
    twice: ClassVar[Literal["kept", "once", "fails"]] = "kept"

    @abstractmethod
    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every id that means something for a model of ``n_layers``, with its state."""

    def stray(self, number: int, n_layers: int) -> Point | None:
        """The state that an id outside the table fetches by accident; None where the library fails."""
        return None

    def place(self, number: int) -> int:
        """Where the library's sort puts an id, if it sorts."""
        return number

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """See `Convention.to_points`."""
        numbers = self._numbers(ids, n_layers)
        states = self.states(n_layers)
        for number in numbers:
            if number not in states:
                self._refuse(ids, n_layers, f"id {number} {self.outside}")
        if twice := _repeated(numbers):
            self._refuse(ids, n_layers, f"{twice[0]} stands there twice")
        if self.order == "depth" and numbers != sorted(numbers, key=self.place):
            self._refuse(ids, n_layers, "they do not ascend, and the library sorts them")
        return tuple(states[number] for number in numbers)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """See `Convention.from_points`."""
        numbers = {point.resolve(n_layers): number for number, point in self.states(n_layers).items()}
        found = []
        for point in points:
            site = self._site(point, n_layers)
            if site not in numbers:
                self._refuse(points, n_layers, f"no id stands for {point}. {self.limits}")
            found.append(numbers[site])
        self._counted(found, points, n_layers)
        if _repeated(found):
            self._refuse(points, n_layers, "one state is named twice")
        if self.order == "depth" and found != sorted(found, key=self.place):
            self._refuse(
                points,
                n_layers,
                f"they are the ids {found}, and the library sorts them; "
                "order the points that way, and permute the head's fc columns along",
            )
        return found

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `Convention.captured`: with what ids outside the table fetch by accident."""
        numbers = self._numbers(ids, n_layers)
        states, quirks = dict(self.states(n_layers)), []
        for number in numbers:
            if number not in states:
                found = self.stray(number, n_layers)
                if found is None:
                    self._refuse(ids, n_layers, f"id {number} {self.outside}")
                states[number] = found
                quirks.append(f"id {number} {self.outside}; it happens to be {found}")
        for number in _repeated(numbers):
            if self.twice == "fails":
                self._refuse(ids, n_layers, f"{number} stands there twice")
            how_often = "twice" if self.twice == "kept" else "once"
            quirks.append(f"id {number} stands there twice: captured {how_often}")
        if self.twice == "once":
            numbers = list(dict.fromkeys(numbers))
        if self.order == "depth" and numbers != sorted(numbers, key=self.place):
            quirks.append("the ids are sorted first")
            numbers.sort(key=self.place)
        return Captured(tuple(states[number] for number in numbers), tuple(quirks))

    def taken(self, ids: Sequence[int], n_layers: int) -> Captured:
        """A default list, through the same code as a written one."""
        found = self.captured(ids, n_layers)
        return Captured(found.points, (f"no ids are given: it takes {list(ids)}", *found.quirks))

    def _site(self, point: Point, n_layers: int) -> Site:
        try:
            return point.resolve(n_layers)
        except SpecError as error:
            raise ConventionError(f"{self.name}: {error}") from None

    def _numbers(self, ids: Sequence[int], n_layers: int) -> list[int]:
        for number in ids:
            if type(number) is not int:  # a bool would count as 0 or 1
                self._refuse(ids, n_layers, f"{number!r} is not an integer")
        self._counted(ids, ids, n_layers)
        return list(ids)

    def _counted(self, found: Sequence[int], request: Sequence[object], n_layers: int) -> None:
        if not found:
            self._refuse(request, n_layers, "there is nothing in it")
        if self.count is not None and len(found) != self.count:
            self._refuse(request, n_layers, f"it takes exactly {self.count}")

    def _refuse(self, request: Sequence[object], n_layers: int, why: str) -> NoReturn:
        shown = f"[{', '.join(str(item) for item in request)}]"
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}, {self.key}): cannot take {shown} "
            f"for a model of {n_layers} layers: {why}"
        )


def outputs(n_layers: int, last: Point | None = None) -> dict[int, Point]:
    """Id k for the output of layer k; ``last`` is what stands there for the last layer, if another state."""
    states = {k: Point.post(k) for k in range(n_layers)}
    if last is not None:
        states[n_layers - 1] = last
    return states


def output_list_entry(number: int, n_layers: int) -> Point | None:
    """What a negative index fetches from a Python list of all layers' outputs."""
    return Point.post(n_layers + number) if -n_layers <= number < 0 else None


def hidden_states_entry(number: int, n_layers: int) -> Point | None:
    """What ``hidden_states[number + 1]`` is for a negative number: the embedding, or counted from the end."""
    entry = number + 1 if number == -1 else n_layers + 2 + number
    if number >= 0 or not 0 <= entry <= n_layers:
        return None
    if entry == n_layers:
        return Point("final_norm")
    return Point("embed") if entry == 0 else Point.post(entry - 1)


def spread(n_layers: int, count: int) -> list[int]:
    """DFlash's default list for a draft of ``count`` layers, evenly from 1 to n-3.

    The same function in z-lab/dflash, SpecForge, TorchSpec, AngelSlim and NeMo Automodel.
    """
    if count == 1:
        return [n_layers // 2]
    return [round(1 + i * (n_layers - 4) / (count - 1)) for i in range(count)]


def _repeated(numbers: Sequence[int]) -> list[int]:
    return [number for number in dict.fromkeys(numbers) if list(numbers).count(number) > 1]
