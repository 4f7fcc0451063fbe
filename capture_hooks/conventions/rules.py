"""What libraries do with a list of layer ids: one rule for each way of doing it, its options as fields.

A convention of ``ids.toml`` is a rule with the fields of its row.  Each rule states what a library does with
any list (``captured``), and of that what it does exactly as asked (``to_points``); which ids name some points
is found by inverting the second.

=================  ===================================================================================
`Vllm`             ids number boundaries; the target's loop asks at each whether it is among them
`VllmBackend`      the same numbers, for hooks that keep the order of the ids
`Sglang`           a setter adds one, or not, and the loop sees what it sees
`SglangBlocks`     the same for lists of block drafters, which are checked first
`Table`            each id stands for a state; a trainer indexes a list of states
`WithLast`         the same, for dumps whose deepest slot is no input
`WithoutLast`      the same, where ids from the last layer on are filtered out
`Fixed`            the ids are not looked at
`Entries`          the ids index the tuple ``hidden_states``, or select from it
`Through`          what another convention says, for the lists that are let through to it
`Never`            no ids mean anything
=================  ===================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NoReturn

from ..errors import Reason, RefusalError, SpecError
from ..spec import Point, Site
from .contract import Captured, Code, Convention, Order, Rank

#: EAGLE's three layers by their inputs, and the same by the outputs before them (SafeAILab/EAGLE cb7e084,
#: ``eagle/model/modeling_llama_kv.py:1138``), and what libraries make of them; text where they refuse.
DEFAULTS: Final[Mapping[str, Callable[[int], list[int] | str]]] = {
    "inputs": lambda n: [2, n // 2, n - 3],
    "outputs": lambda n: [1, n // 2 - 1, n - 4],
    "inputs and last": lambda n: [2, n // 2, n - 3, n - 1],
    # modelopt hf_eagle.default_eagle_aux_layer_ids
    "modelopt": lambda n: sorted({1, max(0, n // 2 - 1), max(0, n - 4)}),
    "tensorrt_llm": lambda n: [0] if n == 1 else _deep_enough(n),
    "tensorrt_llm dump": lambda n: "it has not enough layers for the default" if n == 1 else _deep_enough(n),
}


def _deep_enough(n: int) -> list[int] | str:
    if n <= 5:
        return "it stops with 'Not enough hidden layers for default EAGLE3 capture'"
    return [1, n // 2 - 1, n - 4]


def spread(n_layers: int, count: int) -> list[int]:
    """DFlash's default list for a draft of ``count`` layers, evenly from 1 to n-3.

    The same function in z-lab/dflash, SpecForge, TorchSpec, AngelSlim, NeMo Automodel and SGLang
    (``build_target_layer_ids``).
    """
    if count == 1:
        return [n_layers // 2]
    return [round(1 + i * (n_layers - 4) / (count - 1)) for i in range(count)]


# Not slotted: `Convention` is a plain class, which plugins subclass.
@dataclass(frozen=True, kw_only=True)
class Rule(Convention):
    """The fields of a row that every rule has; see `Convention`."""

    name: str
    library: str
    versions: str
    key: str
    source: str
    limits: str
    rank: Rank
    read_on: str
    families: tuple[str, ...] = ()
    order: Order = "depth"
    count: int | None = None
    primary: bool = True
    overrides: str | None = None
    #: Why there is no default; empty where there is one.
    no_default: str = ""

    def refusal(self, code: Code, request: Iterable[object], n_layers: int, text: str) -> RefusalError:
        """What to raise over a list of ids or of points."""
        shown = f"cannot take [{', '.join(map(str, request))}] for a model of {n_layers} layers: {text}"
        return RefusalError(Reason(code, shown), f"{self.name} ({self.library} {self.versions}, {self.key})")

    def site(self, point: Point, n_layers: int) -> Site:
        """Where a point lies in a model of that depth."""
        try:
            return point.resolve(n_layers)
        except SpecError as error:
            raise RefusalError(Reason("outside", str(error)), self.name) from None

    def integers(self, ids: Sequence[int], n_layers: int) -> list[int]:
        """The ids, where each is an integer."""
        for number in ids:
            if type(number) is not int:  # a bool would count as 0 or 1
                raise self.refusal("type", ids, n_layers, f"{number!r} is not an integer")
        return list(ids)


#: From ids to boundaries: as they are, or one more.  Two setters guess: one more where the first id is 1; as
#: they are where the largest id is n.
Reads = Literal["as_is", "plus_one", "first_decides", "largest_decides"]
#: Why no ids name boundaries that are captured; ``{n}`` is the depth.
_UNSAYABLE: Final[Mapping[str, str]] = {
    "plus_one": "embed would be id -1, and no id is negative",
    "first_decides": "post.0 comes first; the ids would start with 1, and then each is read as one layer "
    "deeper",
    "largest_decides": "the embedding is an id, 0, only in a list that ends with {n}, the last output",
}


@dataclass(frozen=True, kw_only=True)
class Boundaries(Rule):
    """Ascending, distinct ids, each naming one boundary of the residual stream; see `Point`.

    Engines capture while the layers run: whatever the order of the ids, states come out by depth, and an id
    that is written twice is captured once.  A list for which that makes a difference is refused, because the
    head would be fed other columns than its ``fc`` expects.
    """

    reads: Reads = "as_is"
    #: What the library does with a boundary that it does not capture, after "which".
    outside: str = ""
    #: Whether a state is named by the layer that it enters rather than by the one that it leaves.
    entering: bool = False

    def lowest(self, n_layers: int) -> int:
        """The first boundary that is captured; 0 is the embedding."""
        return 0

    def highest(self, n_layers: int) -> int:
        """The last boundary that is captured; ``n_layers`` is the un-normed end."""
        return n_layers

    def point(self, boundary: int, n_layers: int) -> Point:
        """The boundary in the words of this library."""
        if boundary == 0:
            return Point("embed")
        return Point.pre(boundary) if self.entering and 0 < boundary < n_layers else Point.post(boundary - 1)

    def shift(self, ids: Sequence[int], n_layers: int) -> int:
        """What is added to the ids of this list: 0 or 1."""
        if self.reads == "first_decides":
            return int(bool(ids) and ids[0] == 1)
        if self.reads == "largest_decides":
            return int(not (ids and max(ids) == n_layers))
        return int(self.reads == "plus_one")

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        """The boundary that each id names, captured or not."""
        shift = self.shift(ids, n_layers)
        return [number + 1 for number in ids] if shift else list(ids)

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states that these ids mean; see `Convention.to_points`."""
        found = self.boundaries(self._well_formed(ids, n_layers), n_layers)
        for number, boundary in zip(ids, found, strict=True):
            if not self.lowest(n_layers) <= boundary <= self.highest(n_layers):
                text = f"id {number} is boundary {boundary}, which {self.outside}"
                raise self.refusal("outside", ids, n_layers, text)
        return tuple(self.point(boundary, n_layers) for boundary in found)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The first list of ids that the library takes for these boundaries."""
        wanted = self._in_order(points, n_layers)
        # Outputs first: where both lists would do, that one means the same to most other families.
        lists = {shift: [boundary - shift for boundary in wanted] for shift in (1, 0)}
        for shift, ids in lists.items():
            if min(ids) >= 0 and self.shift(ids, n_layers) == shift:
                return ids
        shown = [self.point(boundary, n_layers) for boundary in wanted]
        raise self.refusal("unsayable", shown, n_layers, _UNSAYABLE[self.reads].format(n=n_layers))

    def _well_formed(self, ids: Sequence[int], n_layers: int) -> list[int]:
        found = self.some(ids, n_layers)
        for number in found:
            if number < 0:
                raise self.refusal(
                    "negative", ids, n_layers, f"{number} is negative, and no id counts from the end"
                )
        if twice := _repeated(found):
            text = f"{twice[0]} stands there twice and would be captured once"
            raise self.refusal("twice", ids, n_layers, text)
        if self.order == "depth" and sorted(found) != found:
            text = (
                "they do not ascend, and the states are always concatenated by depth; "
                "sort the ids, and permute the head's fc columns along"
            )
            raise self.refusal("order", ids, n_layers, text)
        return found

    def some(self, ids: Sequence[int], n_layers: int) -> list[int]:
        """The ids, where there are some and each is an integer."""
        found = self.integers(ids, n_layers)
        if not found:
            raise self.refusal("count", ids, n_layers, "there are no ids")
        return found

    def _in_order(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The boundaries of points that could come out as they are listed."""
        wanted = [self._boundary(point, points, n_layers) for point in points]
        if not wanted:
            raise self.refusal("count", points, n_layers, "there are no points")
        first_at: dict[int, Point] = {}
        for point, boundary in zip(points, wanted, strict=True):
            if boundary in first_at:
                text = f"{first_at[boundary]} and {point} are one state, captured once"
                raise self.refusal("twice", points, n_layers, text)
            if self.order == "depth" and any(boundary < before for before in first_at):
                text = (
                    f"{point} comes after a deeper point, and the states are always concatenated by depth; "
                    "order the points by depth, and permute the head's fc columns along"
                )
                raise self.refusal("order", points, n_layers, text)
            first_at[boundary] = point
        return wanted

    def _boundary(self, point: Point, points: Sequence[Point], n_layers: int) -> int:
        site = self.site(point, n_layers)
        if site.boundary is None:
            what = "the output of a norm" if site.norm else "a module's value"
            text = f"{point} is {what}, and its ids name the residual stream only"
            raise self.refusal("unsayable", points, n_layers, text)
        if not self.lowest(n_layers) <= site.boundary <= self.highest(n_layers):
            text = f"{point} is boundary {site.boundary}, which {self.outside}"
            raise self.refusal("outside", points, n_layers, text)
        return site.boundary


@dataclass(frozen=True, kw_only=True)
class Vllm(Boundaries):
    """A target's loop asks at every boundary whether it is among the ids (``EagleModelMixin``).

    So states come out by depth, an id that is written twice counts once, and one that no layer reaches is
    left out without a word.
    """

    entering: bool = True
    outside: str = "no layer reaches, so nothing would be captured for it, silently"
    #: Whether boundary 0 is captured; False where the loop adds a residual that is not there yet.
    embedding: bool = True
    #: Whether the loop looks again after its last layer.
    end: bool = True

    def lowest(self, n_layers: int) -> int:
        return 0 if self.embedding else 1

    def highest(self, n_layers: int) -> int:
        return n_layers if self.end else n_layers - 1

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the loop captures; vLLM's runner fails where that is no state at all."""
        found = self.boundaries(self.some(ids, n_layers), n_layers)
        if 0 in found and not self.embedding:
            text = "boundary 0 adds the embedding to a residual that is None: a crash"
            raise self.refusal("fails", ids, n_layers, text)
        quirks, kept = list[str](), list[int]()
        for number, boundary in zip(ids, found, strict=True):
            if not self.lowest(n_layers) <= boundary <= self.highest(n_layers):
                quirks.append(f"id {number} is boundary {boundary}, which {self.outside}: left out")
            elif boundary in kept:
                quirks.append(f"id {number} names a state that is captured already: captured once")
            else:
                kept.append(boundary)
                if number < 0:
                    quirks.append(f"id {number} is negative and happens to be boundary {boundary}")
        if not kept:
            text = "none is a boundary; nothing is captured, and it stops at the first forward"
            raise self.refusal("fails", ids, n_layers, text)
        if kept != sorted(kept):
            quirks.append("the states are concatenated by depth, not in the order of the ids")
        return Captured(tuple(self.point(boundary, n_layers) for boundary in sorted(kept)), tuple(quirks))

    def default(self, n_layers: int) -> Captured:
        """Boundaries 2, n//2 and n-3, taken like any other list of them (below 7 layers some coincide).

        ``get_eagle3_default_aux_hidden_state_layers``, interfaces.py:1751-1770 of 0.33.0.
        """
        layers = [2, n_layers // 2, n_layers - 3]
        found = self.captured([layer - self.shift(layers, n_layers) for layer in layers], n_layers)
        quirk = f"no ids are given: it takes its default, boundaries {layers}"
        return Captured(found.points, (quirk, *found.quirks))


@dataclass(frozen=True, kw_only=True)
class VllmBackend(Vllm):
    """Models that vLLM runs through its transformers backend: the output of layer k-1, in the ids' order."""

    order: Order = "listed"
    entering: bool = False
    embedding: bool = False

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """The states, each once; for anything else the library fails."""
        found = self.boundaries(self.some(ids, n_layers), n_layers)
        for number, boundary in zip(ids, found, strict=True):
            if not 1 <= boundary <= n_layers:
                text = f"id {number} is boundary {boundary}, which {self.outside}"
                raise self.refusal("fails", ids, n_layers, text)
        once = list(dict.fromkeys(found))
        quirks = ("an id that stands there twice is captured once",) if len(once) < len(found) else ()
        return Captured(tuple(self.point(boundary, n_layers) for boundary in once), quirks)


@dataclass(frozen=True, kw_only=True)
class Sglang(Boundaries):
    """A setter turns ids into boundaries and stores them; the forward keeps the stream where they say so.

    They are stored as a list, or as a mark on each ``self.layers[i]``.  States come out by depth, each once,
    and what is not visited is not there.
    """

    reads: Reads = "plus_one"
    outside: str = "these models capture by no id"
    #: Where boundaries are stored: in a *list* that the loop asks; by *marks* on the layers, where an index
    #: out of range fails and a negative one counts from the end; *both*: marks are set, the list is asked.
    memory: Literal["list", "marks", "both"] = "list"
    #: Whether it looks once more after its last layer, so that boundary n is captured.
    end: bool = False
    #: Whether boundary 0 is captured; False where the loop adds a residual that layer 0 does not have yet.
    embedding: bool = True
    #: Whether the states must be as many as the ids: they are packed into a buffer of that width.
    packed: bool = False
    #: Whether a forward that captured nothing goes on, so that the head is fed what ``lm_head`` is fed.
    goes_on: bool = False
    #: Whether the CUDA graphs of decoding are captured after a call of the setter without ids (to 0.5.10).
    graphs_take_default: bool = False
    #: How much deeper than EAGLE's own layers the default is.
    deeper: int = 0
    #: The list of layers, where the loop leaves out the residual: it keeps what a layer adds, which is the
    #: output of its last norm, so has a name, but is no point of the stream.
    adds: str = ""

    def lowest(self, n_layers: int) -> int:
        # To those that add one, boundary 0 would be id -1: it works by accident, and nothing validates it.
        return 1 if self.reads == "plus_one" or not self.embedding else 0

    def highest(self, n_layers: int) -> int:
        return n_layers if self.end else n_layers - 1

    def point(self, boundary: int, n_layers: int) -> Point:
        if self.adds and boundary:
            return Point("out", module=f"{self.adds}.{boundary - 1}.post_feedforward_layernorm")
        return super().point(boundary, n_layers)

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states that these ids mean; see `Convention.to_points`."""
        points = super().to_points(ids, n_layers)
        if self.graphs_take_default and points != self._default_points(n_layers):
            raise self.refusal("fails", ids, n_layers, self._graphs(n_layers))
        return points

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The ids that mean these states; see `Convention.from_points`."""
        ids = super().from_points(self._of_the_stream(points, n_layers), n_layers)
        named = tuple(self.point(k, n_layers) for k in self.boundaries(ids, n_layers))
        if self.graphs_take_default and named != self._default_points(n_layers):
            raise self.refusal("fails", points, n_layers, self._graphs(n_layers))
        return ids

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the setter and the loop do with any list, whether or not it holds numbers."""
        try:
            found = self.boundaries(ids, n_layers)
        except TypeError as error:
            raise self.refusal("fails", ids, n_layers, f"its setter fails, TypeError: {error}") from None
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
        seen = self._visited(ids, list(named), n_layers, quirks)
        if self.graphs_take_default and seen.points != self._default_points(n_layers):
            return Captured(seen.points, (*seen.quirks, self._graphs(n_layers)))
        return seen

    def default(self, n_layers: int) -> Captured:
        """EAGLE's three layers, sent through the same loop as ids."""
        asked = [(f"the default {k}", k) for k in self._default_boundaries(n_layers)]
        return self._visited([], asked, n_layers, ["no ids are given: it takes its default layers"])

    def _visited(
        self, request: Sequence[object], asked: Sequence[tuple[str, int]], n_layers: int, quirks: list[str]
    ) -> Captured:
        """The states that come out for boundaries that were ``asked``, each with what it is called."""
        kept = list[int]()
        for name, boundary in asked:
            self._remember(request, name, boundary, n_layers)
            if not self._sees(boundary, n_layers):
                quirks.append(f"{name} is boundary {boundary}, which {self.outside}: left out")
                continue
            seen = int(boundary) % n_layers if self.memory == "marks" else int(boundary)
            if seen == 0 and not self.embedding:
                text = f"{name} is boundary 0, where it adds a residual that is None: TypeError"
                raise self.refusal("fails", request, n_layers, text)
            if seen in kept:
                quirks.append(f"{name} names a state that is captured already: captured once")
            else:
                kept.append(seen)
        if kept and self.packed and len(kept) < len(asked):
            few = f"captured {len(kept)} of {len(asked)} aux hidden states ({'; '.join(quirks)})"
            raise self.refusal("fails", request, n_layers, f"its forward fails, RuntimeError: {few}")
        if not kept and not self.goes_on:
            why = "; ".join(quirks) or "there are no ids"
            text = f"nothing is captured, and its forward fails to unpack the pair ({why})"
            raise self.refusal("fails", request, n_layers, text)
        if not kept:
            quirks.append("nothing is captured, and the head is fed what lm_head is fed")
            return Captured((Point("final_norm"),), tuple(quirks))
        if kept != sorted(kept):
            quirks.append("the states are concatenated by depth, not in the order of the ids")
        return Captured(tuple(self.point(boundary, n_layers) for boundary in sorted(kept)), tuple(quirks))

    def _remember(self, request: Sequence[object], name: str, boundary: int, n_layers: int) -> None:
        if self.memory == "list":
            return
        if not isinstance(boundary, int):
            raise self.refusal(
                "fails", request, n_layers, f"{name} marks self.layers[{boundary}], a TypeError"
            )
        if not -n_layers <= boundary < n_layers:
            raise self.refusal(
                "fails", request, n_layers, f"{name} marks self.layers[{boundary}], an IndexError"
            )

    def _sees(self, boundary: int, n_layers: int) -> bool:
        # `in` asks for equality, as the library's own `i in self.layers_to_capture` does.
        return self.memory == "marks" or boundary in range(self.highest(n_layers) + 1)

    def _of_the_stream(self, points: Sequence[Point], n_layers: int) -> Sequence[Point]:
        """Points of the stream, in place of those that this library has instead."""
        if not self.adds:
            return points
        names = {self.point(k, n_layers): Point.post(k - 1) for k in range(1, n_layers + 1)}
        for point in points:
            if point not in names:
                text = (
                    f"{point} cannot be captured: its loop leaves out the residual, and keeps only what "
                    f"each layer adds, such as {self.point(1, n_layers)}"
                )
                raise self.refusal("unsayable", points, n_layers, text)
        return [names[point] for point in points]

    def _default_boundaries(self, n_layers: int) -> list[int]:
        return [boundary + self.deeper for boundary in (2, n_layers // 2, n_layers - 3)]

    def _default_points(self, n_layers: int) -> tuple[Point, ...]:
        by_depth = sorted(set(self._default_boundaries(n_layers)))
        return tuple(self.point(k, n_layers) for k in by_depth if 0 <= k < n_layers)

    def _graphs(self, n_layers: int) -> str:
        layers = ", ".join(map(str, self._default_points(n_layers)))
        return f"decoding under CUDA graphs captures its default, [{layers}], whatever the ids"


@dataclass(frozen=True, kw_only=True)
class SglangBlocks(Sglang):
    """Ids of DFlash and DSpark drafts: turned into integers and checked before any model sees them.

    After ``parse_dflash_draft_config`` and ``resolve_target_layer_ids``.
    """

    #: Whether the model's own setter refuses the last layer too.
    before_last: bool = False
    #: Whether ids must ascend, each once.
    ascending: bool = False
    #: Whether the model has a setter for the DSPARK algorithm alone.
    dspark_only: bool = False

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the ids capture; the library refuses an id that is no layer."""
        for number in self._parsed(ids, n_layers):
            if not 0 <= number < n_layers:
                raise self.refusal("fails", ids, n_layers, f"{number} is no layer, a ValueError")
        return self.unchecked(ids, n_layers)

    def unchecked(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As `captured`, for ids that the library does not compare with the target's depth."""
        numbers = self._parsed(ids, n_layers)
        for number in numbers:
            if self.before_last and not 0 <= number < n_layers - 1:
                text = f"{number} is not in [0, {n_layers - 1}), as it must be: a ValueError"
                raise self.refusal("fails", ids, n_layers, text)
        if self.ascending and numbers != sorted(set(numbers)):
            raise self.refusal(
                "fails", ids, n_layers, "target_layer_ids must ascend, each once, a ValueError"
            )
        found = super().captured(numbers, n_layers)
        odd = [
            f"id {given!r} is no integer, and counts as {number}"
            for given, number in zip(ids, numbers, strict=True)
            if type(given) is not int
        ]
        return Captured(found.points, (*odd, *found.quirks))

    def default(self, n_layers: int) -> Captured:
        """It depends on the draft: see `spread`."""
        text = "its default spreads over the target as many layers as the draft has"
        raise self.refusal("default", [], n_layers, text)

    def _parsed(self, ids: Sequence[int], n_layers: int) -> list[int]:
        try:
            numbers = [int(number) for number in ids]
        except (TypeError, ValueError, OverflowError) as error:
            text = f"its reader fails, {type(error).__name__}: {error}"
            raise self.refusal("fails", ids, n_layers, text) from None
        if not numbers:
            raise self.refusal("fails", ids, n_layers, "target_layer_ids must be non-empty, a ValueError")
        return numbers


@dataclass(frozen=True, kw_only=True)
class Table(Rule):
    """Each id stands for a state; a number outside the table fails, or fetches what Python's indexing gives.

    Trainers index a list of states, so states come out in the ids' own order, unless the library sorts them.
    """

    order: Order = "listed"
    #: Whether id k is the state that enters layer k or the one that leaves it; *none*: no id is a state.
    numbers: Literal["inputs", "outputs", "none"] = "outputs"
    #: What the id of the end of the stream gives (n-1 for outputs, n for inputs): the *stream* as it is, the
    #: final *norm*, or nothing.
    end: Literal["stream", "norm", "none"] = "stream"
    #: What id -1 stands for, where it is meant to.
    minus_one: Literal["embed", "final_norm"] | None = None
    #: Whether -1 is moved behind every layer, where ids are sorted.
    minus_one_last: bool = False
    #: What a number outside the table fetches: an entry of ``hidden_states``, counted from the end or not;
    #: one of a list of *outputs*, counted from the end; or, by -1, the *input* of layer 0.
    fetches: Literal["nothing", "hidden_states", "outputs", "input"] = "nothing"
    #: What an id outside the table does, after "id 7".
    outside: str = ""
    #: What an id that is written twice does: both columns are there, one is, or the library fails.
    twice: Literal["kept", "once", "fails"] = "kept"
    #: Whether the library checks its list, so that nothing happens silently.
    checked: bool = False
    #: Which of `DEFAULTS` it takes.
    defaults: str = "outputs"

    def states(self, n_layers: int) -> dict[int, Point]:
        """Every id that means something, with its state."""
        if self.numbers == "none":
            return {}
        if self.numbers == "outputs":
            states = {k: Point.post(k) for k in range(n_layers - 1)}
            last = n_layers - 1
        else:
            states = {k: Point.pre(k) if k else Point("embed") for k in range(n_layers)}
            last = n_layers
        if self.end != "none":
            states[last] = Point("final_norm") if self.end == "norm" else Point.post(n_layers - 1)
        return states if self.minus_one is None else {-1: Point(self.minus_one), **states}

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states that these ids mean; see `Convention.to_points`."""
        numbers, states = self._numbers(ids, n_layers), self.states(n_layers)
        for number in numbers:
            if number not in states:
                raise self.refusal("outside", ids, n_layers, f"id {number} {self.outside}")
        if twice := _repeated(numbers):
            raise self.refusal("twice", ids, n_layers, f"{twice[0]} stands there twice")
        if self.order == "depth" and numbers != sorted(numbers, key=self._place):
            raise self.refusal("order", ids, n_layers, "they do not ascend, and the library sorts them")
        return tuple(states[number] for number in numbers)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The ids that mean these states; see `Convention.from_points`."""
        numbers = {point.resolve(n_layers): number for number, point in self.states(n_layers).items()}
        found = list[int]()
        for point in points:
            site = self.site(point, n_layers)
            if site not in numbers:
                raise self.refusal("unsayable", points, n_layers, f"no id stands for {point}. {self.limits}")
            found.append(numbers[site])
        self._counted(found, points, n_layers)
        if _repeated(found):
            raise self.refusal("twice", points, n_layers, "one state is named twice")
        if self.order == "depth" and found != sorted(found, key=self._place):
            text = (
                f"they are the ids {found}, and the library sorts them; "
                "order the points that way, and permute the head's fc columns along"
            )
            raise self.refusal("order", points, n_layers, text)
        return found

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the ids fetch, those outside the table included, which fetch a state by accident."""
        if self.checked:
            return Captured(self.to_points(ids, n_layers))
        numbers, states, quirks = self._numbers(ids, n_layers), self.states(n_layers), list[str]()
        for number in numbers:
            if number not in states:
                found = self._fetched(number, n_layers)
                if found is None:
                    raise self.refusal("outside", ids, n_layers, f"id {number} {self.outside}")
                states[number] = found
                quirks.append(f"id {number} {self.outside}; it happens to be {found}")
        for number in _repeated(numbers):
            if self.twice == "fails":
                raise self.refusal("twice", ids, n_layers, f"{number} stands there twice")
            how_often = "twice" if self.twice == "kept" else "once"
            quirks.append(f"id {number} stands there twice: captured {how_often}")
        if self.twice == "once":
            numbers = list(dict.fromkeys(numbers))
        if self.order == "depth" and numbers != sorted(numbers, key=self._place):
            quirks.append("the ids are sorted first")
            numbers.sort(key=self._place)
        return Captured(tuple(states[number] for number in numbers), tuple(quirks))

    def default(self, n_layers: int) -> Captured:
        """The default list, taken through the same code as a written one."""
        if self.no_default:
            raise self.refusal("default", (), n_layers, self.no_default)
        ids = DEFAULTS[self.defaults](n_layers)
        if isinstance(ids, str):
            raise self.refusal("default", (), n_layers, ids)
        found = self.captured(ids, n_layers)
        return Captured(found.points, (f"no ids are given: it takes {list(ids)}", *found.quirks))

    def _fetched(self, number: int, n_layers: int) -> Point | None:
        """The state that an id outside the table fetches by accident; None where the library fails."""
        if self.fetches == "input":
            return Point("embed") if number == -1 else None
        if self.fetches == "outputs":
            return Point.post(n_layers + number) if -n_layers <= number < 0 else None
        if self.fetches == "nothing" or not -n_layers - 2 <= number < 0:
            return None
        entry = (number + 1) % (n_layers + 1)  # the list is indexed by one more
        if entry == n_layers:
            return Point("final_norm")
        return Point.post(entry - 1) if entry else Point("embed")

    def _place(self, number: int) -> int:
        """Where the library's sort puts an id, if it sorts."""
        return sys.maxsize if self.minus_one_last and number < 0 else number

    def _numbers(self, ids: Sequence[int], n_layers: int) -> list[int]:
        found = self.integers(ids, n_layers)
        self._counted(found, ids, n_layers)
        return found

    def _counted(self, found: Sequence[int], request: Sequence[object], n_layers: int) -> None:
        if not found:
            raise self.refusal("count", request, n_layers, "there is nothing in it")
        if self.count is not None and len(found) != self.count:
            raise self.refusal("count", request, n_layers, f"it takes exactly {self.count}")


@dataclass(frozen=True, kw_only=True)
class WithLast(Table):
    """States of a dump by depth, each once; a consumer splits the deepest one off, which is no input.

    Points of the list are all its slots.  It is taken only where its deepest slot is the end of the stream.
    """

    order: Order = "depth"
    twice: Literal["kept", "once", "fails"] = "once"

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states that these ids mean, without the last one, which is no input of the head."""
        found = super().to_points(ids, n_layers)
        if ids[-1] != max(self.states(n_layers)):
            raise self.refusal("order", ids, n_layers, self._mistaken(found[-1], n_layers))
        return found

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The ids that mean these states; the points must include the last one."""
        found = super().from_points(points, n_layers)
        if found[-1] != max(self.states(n_layers)):
            raise self.refusal("order", points, n_layers, self._mistaken(points[-1], n_layers))
        return found

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the library does with these ids; see `Convention.captured`."""
        found = super().captured(ids, n_layers)
        states = self.states(n_layers)
        if found.points[-1] == states[max(states)]:
            return found
        return Captured(found.points, (*found.quirks, self._mistaken(found.points[-1], n_layers)))

    def _mistaken(self, point: Point, n_layers: int) -> str:
        return f"the last slot, {point}, is taken for the last state, id {max(self.states(n_layers))}"


@dataclass(frozen=True, kw_only=True)
class WithoutLast(Table):
    """The last layer's output is taken for the last hidden state, and ids from there on are filtered out."""

    order: Order = "depth"
    end: Literal["stream", "norm", "none"] = "none"

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the library does with these ids; see `Convention.captured`."""
        numbers, last = self._numbers(ids, n_layers), n_layers - 1
        quirks = tuple(
            f"id {number} is the last layer, whose output is taken for the last hidden state: left out"
            if number == last
            else f"id {number} is beyond the last layer: left out"
            for number in dict.fromkeys(numbers)
            if number >= last
        )
        if numbers.count(last) > 1:
            raise self.refusal("twice", ids, n_layers, f"{last} stands there twice")
        rest = [number for number in numbers if number < last]
        if not rest:
            raise self.refusal("fails", ids, n_layers, "nothing is left for the head")
        found = super().captured(rest, n_layers)
        return Captured(found.points, (*quirks, *found.quirks))


@dataclass(frozen=True, kw_only=True)
class Fixed(Table):
    """Whatever a config says, the inputs of layers 2, n//2 and n-3, which are written into the model's loop.

    In a model of fewer than 7 layers fewer than three states come out, and the head's ``fc`` does not fit.
    """

    order: Order = "depth"
    numbers: Literal["inputs", "outputs", "none"] = "none"

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Always refused."""
        raise self.refusal("never", ids, n_layers, self.limits)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Its own layers; the ids are not looked at."""
        found = self.default(n_layers)
        return Captured(found.points, (f"the ids {list(ids)} are not looked at", *found.quirks))

    def default(self, n_layers: int) -> Captured:
        """Its own layers, as far as the model has them."""
        inside = sorted({k for k in (2, n_layers // 2, n_layers - 3) if 0 <= k < n_layers})
        points = tuple(Point.pre(k) if k else Point("embed") for k in inside)
        few = f"in a model of {n_layers} layers only {len(points)} of its three states are there"
        return Captured(points, () if len(points) == 3 else (few,))


@dataclass(frozen=True, kw_only=True)
class Entries(Rule):
    """Ids index the tuple ``hidden_states`` of transformers, in the order indexed, or select from it.

    Entry k is ``pre.k``; entry n is the output of the final norm and not the un-normed end of the stream,
    because the last entry is replaced by ``last_hidden_state``.
    """

    order: Order = "listed"
    no_default: str = "it is a tuple to choose from, and has no default"
    #: What entry k is for k < n: the state that enters layer k, or the one that leaves it.
    entries: Literal["inputs", "outputs"] = "inputs"
    #: What entry n is: the final *norm*, or the *stream* as it is.
    end: Literal["stream", "norm"] = "norm"
    #: Entries before the one that id 0 names.
    first: int = 0
    #: Whether the ids select entries, which come by depth, instead of indexing the tuple.
    selects: bool = False

    def entry(self, index: int, n_layers: int) -> Point:
        """What stands at ``index``, from 0 to n."""
        if index == n_layers:
            return Point("final_norm") if self.end == "norm" else Point.post(n_layers - 1)
        if self.entries == "outputs":
            return Point.post(index)
        if index == 0:
            return Point("embed")
        return Point.post(index - 1) if self.first else Point.pre(index)

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states that these ids mean; see `Convention.to_points`."""
        captured = self.captured(ids, n_layers)
        if captured.quirks:
            raise self.refusal("outside", ids, n_layers, captured.quirks[0])
        return captured.points

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The ids that mean these states; see `Convention.from_points`."""
        entries = {self.entry(k, n_layers).resolve(n_layers): k for k in range(self.first, n_layers + 1)}
        ids = list[int]()
        for point in points:
            site = self.site(point, n_layers)
            if site not in entries:
                where = "" if site.boundary is None else f"boundary {site.boundary}, which is "
                text = f"{point} is {where}not in the tuple (or no id names it): {self.limits}"
                raise self.refusal("unsayable", points, n_layers, text)
            ids.append(entries[site] - self.first)
        if not points:
            raise self.refusal("count", points, n_layers, "there are no points")
        if _repeated(ids):
            raise self.refusal("twice", points, n_layers, "one state stands there twice")
        if self.order == "depth" and ids != sorted(ids):
            raise self.refusal("order", points, n_layers, "the states come by depth, and these points do not")
        return ids

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the library does with these ids; see `Convention.captured`."""
        numbers = self.integers(ids, n_layers)
        if not numbers:
            raise self.refusal("count", ids, n_layers, "there are no ids")
        return self._selected(numbers, n_layers) if self.selects else self._indexed(numbers, n_layers)

    def default(self, n_layers: int) -> Captured:
        """Without ids there is the whole tuple, of which nothing is chosen."""
        raise self.refusal("default", [], n_layers, self.no_default)

    def _indexed(self, ids: Sequence[int], n_layers: int) -> Captured:
        """A negative index counts from the tuple's end, and one beyond it is an IndexError."""
        points, quirks = list[Point](), list[str]()
        for number in ids:
            index = number + self.first
            if not -n_layers - 1 <= index <= n_layers:
                text = f"hidden_states[{index}] is not in the tuple, an IndexError"
                raise self.refusal("outside", ids, n_layers, text)
            point = self.entry(index % (n_layers + 1), n_layers)
            if number < 0:
                quirks.append(f"{number} is negative, and is {point} by counting from an end of the tuple")
            if point in points:
                quirks.append(f"{point} is there more than once")
            points.append(point)
        return Captured(tuple(points), tuple(quirks))

    def _selected(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What is out of range selects nothing; what is selected twice is there once."""
        entries, quirks = list[int](), list[str]()
        for number in ids:
            index = number % (n_layers + 1)
            if not -n_layers - 1 <= number <= n_layers:
                quirks.append(f"{number} is not in the tuple, and selects nothing")
                continue
            if number < 0:
                quirks.append(f"{number} is negative, and selects {self.entry(index, n_layers)}")
            if index in entries:
                quirks.append(f"{self.entry(index, n_layers)} is selected twice, and there once")
            else:
                entries.append(index)
        if entries != sorted(entries):
            quirks.append("they come by depth, not in the order of the ids")
        return Captured(tuple(self.entry(index, n_layers) for index in sorted(entries)), tuple(quirks))


@dataclass(frozen=True, kw_only=True)
class Through(Rule):
    """What another library's convention says, for the lists that are let through to its setter.

    SpecForge takes a run's own list, else the draft config's nested one, else EAGLE's three layers, and
    checks that they are distinct and not negative.
    """

    through: Convention

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states that these ids mean; see `Convention.to_points`."""
        return self.through.to_points(self._let_through(ids, n_layers), n_layers)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The ids that mean these states; see `Convention.from_points`."""
        return self._let_through(self.through.from_points(points, n_layers), n_layers)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the library does with these ids; see `Convention.captured`."""
        return self.through.captured(self._let_through(ids, n_layers), n_layers)

    def default(self, n_layers: int) -> Captured:
        """1, n//2-1 and n-4, sent through like any other list."""
        if self.no_default:
            raise self.refusal("default", (), n_layers, self.no_default)
        ids = [1, n_layers // 2 - 1, n_layers - 4]
        found = self.captured(ids, n_layers)
        return Captured(found.points, (f"no ids are given: it takes {ids}", *found.quirks))

    def _let_through(self, ids: Sequence[int], n_layers: int) -> list[int]:
        if self.count is not None and len(ids) != self.count:
            raise self.refusal("count", ids, n_layers, f"it takes exactly {self.count}")
        if not ids:
            raise self.refusal("count", ids, n_layers, "there are no ids")
        for number in ids:
            if type(number) is not int or number < 0:
                raise self.refusal("type", ids, n_layers, f"{number!r} is no integer from 0")
        if _repeated(ids):
            raise self.refusal("twice", ids, n_layers, "they must be distinct")
        return list(ids)


@dataclass(frozen=True, kw_only=True)
class Never(Rule):
    """Targets whose states a library does not hand out, or not as a boundary of one residual stream."""

    #: Why, in one sentence without its full stop.
    why: str
    #: Whether what was asked stands before it.
    quotes: bool = False
    #: Whether the model has a setter all the same, which fills a list that its loop never asks.
    has_setter: bool = False

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Always refused."""
        self._refuse(ids)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Always refused."""
        self._refuse(points)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Always refused."""
        self._refuse(ids)

    def default(self, n_layers: int) -> Captured:
        """Always refused."""
        self._refuse([])

    def _refuse(self, request: Iterable[object]) -> NoReturn:
        asked = f"cannot take [{', '.join(map(str, request))}]: these targets " if self.quotes else ""
        reason = Reason("never", asked + self.why)
        raise RefusalError(reason, f"{self.name} ({self.library} {self.versions})")


RULES: Final[Mapping[str, type[Rule]]] = {
    "vllm": Vllm,
    "vllm_backend": VllmBackend,
    "sglang": Sglang,
    "sglang_blocks": SglangBlocks,
    "table": Table,
    "with_last": WithLast,
    "without_last": WithoutLast,
    "fixed": Fixed,
    "entries": Entries,
    "through": Through,
    "never": Never,
}


def _repeated(numbers: Sequence[int]) -> list[int]:
    return [number for number in dict.fromkeys(numbers) if list(numbers).count(number) > 1]
