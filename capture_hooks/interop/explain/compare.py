"""The name of a difference: which states are fed, against which the head was trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ...spec import Point
from ...spec.points import Site
from .report import Norm, State


def one_spelling(point: Point, n_layers: int, split: Collection[int] = ()) -> Point:
    """``pre.k`` as ``post.(k-1)``, so that equal states look equal; at a split boundary they are not equal.

    Raises:
        SpecError: a layer out of range.
    """
    boundary = point.resolve(n_layers).boundary
    if boundary is None or boundary in split:
        return point.absolute(n_layers)
    return Point.post(boundary - 1) if boundary else Point("embed")


def state_of(point: Point, n_layers: int, split: Collection[int] = ()) -> State:
    """A point with the state of its norm.

    Raises:
        SpecError: a layer out of range.
    """
    site = point.resolve(n_layers)
    norm: Norm = "stream"
    if site.boundary == 0:
        norm = "embedding"
    elif site.norm:
        norm = "normed"
    elif site.module is not None:
        norm = "module"
    return State(point=str(one_spelling(point, n_layers, split)), boundary=site.boundary, norm=norm)


def differences(
    trained: Sequence[Point], captured: Sequence[Point], n_layers: int, split: Collection[int] = ()
) -> tuple[str, ...]:
    """How ``captured`` differs from ``trained``, a sentence each; none where they are the same in order.

    The commonest faults are named as a whole (every state shifted by one layer, order permuted, a slot
    dropped); anything else slot by slot.

    Raises:
        SpecError: a layer out of range.
    """
    was = [point.resolve(n_layers, split) for point in trained]
    now = [point.resolve(n_layers, split) for point in captured]
    if was == now:
        return ()
    trained = [one_spelling(point, n_layers, split) for point in trained]
    captured = [one_spelling(point, n_layers, split) for point in captured]
    if Counter(was) == Counter(now):
        return (
            f"order permuted: fed {_list(captured)}, trained on {_list(trained)}; fc's columns meet other "
            f"states",
        )
    if len(was) != len(now):
        return _other_number(trained, captured, was, now)
    shift = _shift(was, now)
    if shift is not None:
        return (f"every state is {_layers(shift)} than trained",)
    return tuple(
        _slot(index, before, after, was[index], now[index])
        for index, (before, after) in enumerate(zip(trained, captured, strict=True))
        if was[index] != now[index]
    )


def _other_number(
    trained: Sequence[Point], captured: Sequence[Point], was: list[Site], now: list[Site]
) -> tuple[str, ...]:
    if len(now) < len(was):
        count = f"{len(was) - len(now)} of {len(was)} states missing"
        if (kept := _found_in(now, was)) is not None:
            lost = [point for index, point in enumerate(trained) if index not in kept]
            return (f"{count}: {_list(lost)} is not captured",)
        for shift in (1, -1):
            if (kept := _found_in([_moved(site, -shift) for site in now], was)) is not None:
                lost = [point for index, point in enumerate(trained) if index not in kept]
                return (
                    f"the states that are captured are {_layers(shift)} than trained",
                    f"{count}: nothing is captured for {_list(lost)}",
                )
        return (f"{count}: fed {_list(captured)}, trained on {_list(trained)}",)
    if (kept := _found_in(was, now)) is not None:
        extra = [point for index, point in enumerate(captured) if index not in kept]
        return (f"{len(now) - len(was)} states too many: {_list(extra)} was not trained on",)
    return (
        f"{len(now)} states, and {len(was)} were trained on: fed {_list(captured)}, not {_list(trained)}",
    )


def _found_in(few: Sequence[Site | None], many: Sequence[Site]) -> set[int] | None:
    """Indices in ``many`` at which ``few`` stands, in order; None where it does not."""
    found: set[int] = set()
    start = 0
    for site in few:
        if site is None or site not in many[start:]:
            return None
        start = many.index(site, start) + 1
        found.add(start - 1)
    return found if found else None


def _moved(site: Site, by: int) -> Site | None:
    if site.boundary is None or site.boundary + by < 0:
        return None
    return Site(boundary=site.boundary + by)


def _shift(was: list[Site], now: list[Site]) -> int | None:
    """The one number of layers by which every state moved."""
    moved = {
        None if a.boundary is None or b.boundary is None else b.boundary - a.boundary
        for a, b in zip(was, now, strict=True)
    }
    return moved.pop() if len(moved) == 1 and moved != {0} else None


def _slot(index: int, before: Point, after: Point, was: Site, now: Site) -> str:
    where = f"slot {index}: {after}, trained on {before}"
    if was.boundary is not None and was.boundary == now.boundary:
        return f"{where} (the model adds something between the two)"
    if was.boundary == 0:
        return f"{where} (no embedding is fed)"
    if now.boundary == 0:
        return f"{where} (the embedding is fed)"
    if was.norm:
        return f"{where} (un-normed, and the head was trained on the normed state)"
    if now.norm:
        return f"{where} (normed, and the head was trained on the un-normed stream)"
    if was.boundary is not None and now.boundary is not None:
        return f"{where} ({_layers(now.boundary - was.boundary)})"
    return where


def _layers(shift: int) -> str:
    return f"{_number(abs(shift))} {'deeper' if shift > 0 else 'earlier'}"


def _number(layers: int) -> str:
    return "one layer" if layers == 1 else f"{layers} layers"


def _list(points: Sequence[Point]) -> str:
    return ", ".join(map(str, points)) or "nothing"
