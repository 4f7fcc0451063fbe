"""Which states a head's inputs are: read by a convention that the layout or the user names, never guessed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ...conventions import Convention, Conventions, convention_for, require_verified
from ...conventions.lookup import in_force, meaning
from ...errors import ConventionError, HeadError
from ...heads.consistency import same_points
from ...heads.engines import VLLM_KEY, is_refusal
from ...spec import CaptureSpec, Point
from .draft import TargetShape
from .open import RawHead

#: The convention that a layout itself fixes.
FIXED: Final = {"speculators": "speculators"}


def inputs_of(
    raw: RawHead,
    target: TargetShape,
    written_for: str | None,
    spec: CaptureSpec | None,
    unverified: bool,
    conventions: Conventions,
) -> tuple[CaptureSpec, tuple[str, ...], tuple[str, ...]]:
    """The states of a head in the order of its ``fc`` columns; what contradicts them; what to know.

    Args:
        raw: the head.
        target: its target.
        written_for: the library or convention its ids were written for, such as ``specforge``.
        spec: its inputs in the order of ``fc``'s columns, where the user knows them.
        unverified: take a convention that was only read in its library's source.
        conventions: what layer ids may mean.

    Raises:
        HeadError: nothing says what the ids mean, or two things that do disagree.
        ConventionError: the ids mean nothing in that convention, or it was never verified.
    """
    if raw.section is not None:
        own = raw.section.capture_spec
        inputs = tuple(own.inputs[index] for index in raw.section.order)
        found = CaptureSpec(inputs, own.target)
        _check_same(found, spec, target, f"{raw.directory}: its capture section says")
        return found, (), ()
    name = written_for or FIXED.get(raw.layout)
    if name is None and spec is None:
        raise HeadError(_ambiguous(raw, target, conventions))
    absolute = spec.absolute(target.n_layers) if spec is not None else None
    if name is None:
        assert absolute is not None
        return absolute, *_contradictions(raw, target, absolute, absolute.inputs, None, conventions)
    chosen = chosen_convention(name, target.family, unverified, conventions)
    key = _key(chosen, raw)
    if key in raw.ids:
        points, ordered = _meant(chosen, _list(raw.ids[key], key, raw), target, absolute)
        notes: tuple[str, ...] = () if ordered else (_other_order(key, raw.ids[key]),)
    elif raw.ids:
        keys = ", ".join(raw.ids)
        raise HeadError(
            f"{raw.directory}: {chosen.name} reads {key}, which is not there; its ids stand at {keys}"
        )
    elif written_for is None and absolute is None:
        raise HeadError(
            f"{raw.directory} lists no layer ids. {chosen.library} itself would take its default "
            f"({_said(chosen.default(target.n_layers).points)}): say --written-for {name} if that is what it "
            "was trained on, or give --spec"
        )
    elif absolute is not None:
        points, notes = absolute.inputs, ()
    else:
        points = chosen.default(target.n_layers).points
        notes = (f"it lists no layer ids; {chosen.name}'s default was taken: {_said(points)}",)
    found = CaptureSpec(points) if absolute is None else CaptureSpec(points, absolute.target)
    _check_same(found, absolute, target, f"{raw.directory}: to {chosen.name} its {key} mean")
    contradictions, others = _contradictions(raw, target, absolute, points, key, conventions)
    return found, contradictions, (*notes, *others)


def chosen_convention(name: str, family: str, unverified: bool, conventions: Conventions) -> Convention:
    """A library's convention for this family, or the one of that name.

    Raises:
        ConventionError: none is installed, it does not hold for this family, or it was only read in source.
    """
    known = {candidate.name: candidate for candidate in in_force(conventions)}
    if name in known and name not in {candidate.library for candidate in known.values()}:
        found = known[name]
    else:
        found = convention_for(name, family, known=conventions)
    require_verified(found, unverified)
    return found


def _key(chosen: Convention, raw: RawHead) -> str:
    """Where a head keeps the ids of a convention.

    Those of a program's argument (a dump script's) have no key of their own: the exporter writes the same
    numbers where it writes ids.
    """
    if chosen.key.endswith("layer_ids") or len(raw.ids) != 1:
        return chosen.key
    return next(iter(raw.ids))


def _contradictions(
    raw: RawHead,
    target: TargetShape,
    spec: CaptureSpec | None,
    points: Sequence[Point],
    used: str | None,
    conventions: Conventions,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ids under other keys that mean other states to whoever reads them there, and those in another order.

    Where the user has said the order (``spec``), ids need only name the same states: they are written anew.
    """
    nested = "eagle_config." + VLLM_KEY
    found = [
        f"{key} = {ids!r} lists layers for another kind of head, and was left out"
        for key, ids in raw.ids.items()
        if key not in (used, nested, VLLM_KEY)
    ]
    notes = []
    for key, reader in ((nested, "sglang"), (VLLM_KEY, "vllm")):
        ids = raw.ids.get(key)
        if ids is None or key == used or is_refusal(ids):
            continue
        try:
            convention = convention_for(reader, target.family, key, known=conventions)
            meant, ordered = _meant(convention, _list(ids, key, raw), target, spec)
        except ConventionError as error:
            found.append(f"{key} = {ids!r} means nothing to {reader}: {error}")
            continue
        if not same_points(tuple(meant), tuple(points), target.n_layers):
            if spec is None or not _same_states(meant, points, target):
                found.append(f"{key} = {ids} means {_said(meant)} to {reader}, and not {_said(points)}")
                continue
            ordered = False
        if not ordered:
            notes.append(_other_order(key, ids))
    return tuple(found), tuple(notes)


def _meant(
    convention: Convention, ids: list[int], target: TargetShape, spec: CaptureSpec | None
) -> tuple[tuple[Point, ...], bool]:
    """The states that ids mean, and whether in the order of the ids.

    Servers concatenate by depth, so that most conventions refuse ids that do not ascend.  They still name
    states, and where ``spec`` lists the same ones, its order is theirs.

    Raises:
        ConventionError: they mean nothing.
    """
    try:
        return tuple(convention.to_points(ids, target.n_layers)), True
    except ConventionError:
        if spec is None or any(type(number) is not int for number in ids) or sorted(ids) == ids:
            raise
    meant = tuple(convention.to_points(sorted(ids), target.n_layers))
    return (spec.inputs, False) if _same_states(meant, spec.inputs, target) else (meant, False)


def _same_states(left: Sequence[Point], right: Sequence[Point], target: TargetShape) -> bool:
    sites = [sorted(repr(point.resolve(target.n_layers)) for point in points) for points in (left, right)]
    return sites[0] == sites[1]


def _other_order(key: str, ids: Any) -> str:
    return f"{key} = {ids} names the states in another order than fc's columns have; the spec's was taken"


def _ambiguous(raw: RawHead, target: TargetShape, conventions: Conventions) -> str:
    lines = [
        f"{raw.directory}: layer ids alone do not say which states they mean. Say --written-for LIBRARY, or "
        "--spec with the points in the order of fc's columns, such as 'post.1, post.14, post.26'"
    ]
    for key, ids in raw.ids.items():
        lines.append(f"  {key} = {ids!r} would mean:")
        lines += [f"    {reading}" for reading in _meanings(ids, key, target, conventions)]
    if not raw.ids:
        lines.append("  it lists no ids; a library named with --written-for would take its default layers")
    return "\n".join(lines)


def _meanings(ids: Any, key: str, target: TargetShape, conventions: Conventions) -> Iterator[str]:
    """One line for each meaning that some convention of this key gives the ids."""
    of_key = [candidate for candidate in in_force(conventions) if candidate.key == key]
    claimed = {candidate.library for candidate in of_key if target.family in candidate.families}
    by_meaning: dict[str, list[str]] = {}
    for candidate in of_key:
        if target.family not in candidate.families and (candidate.families or candidate.library in claimed):
            continue
        points = meaning(candidate, ids, target.n_layers).points
        said = _said(points) if points is not None else "nothing (it is refused)"
        by_meaning.setdefault(said, []).append(candidate.name)
    for said, names in by_meaning.items():
        yield f"{said}  to {', '.join(sorted(names))}"


def _list(ids: Any, key: str, raw: RawHead) -> list[int]:
    if not isinstance(ids, list):
        raise HeadError(f"{raw.directory}: {key} is {ids!r}; a list of integers is needed")
    return ids


def _check_same(found: CaptureSpec, asked: CaptureSpec | None, target: TargetShape, says: str) -> None:
    if asked is not None and not same_points(found.inputs, asked.inputs, target.n_layers):
        raise HeadError(f"{says} {_said(found.inputs)}, and the spec given is {_said(asked.inputs)}")


def _said(points: Sequence[Point]) -> str:
    return ", ".join(str(point) for point in points)
