"""One row for each engine and version: what it captures, and whether the head was trained on that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...conventions import Captured, Convention, Conventions, Reader, convention_for
from ...conventions.contract import why
from ...conventions.lookup import in_force
from ...conventions.versions import Versions, release
from ...errors import ConventionError, SpecError
from ...spec import Point
from ..heads.open import layer_ids
from .compare import differences, one_spelling, state_of
from .report import IdsFrom, Row, Verdict
from .subject import TargetFacts
from .trained import Known, TrainedOn, applying_to, for_block_drafters, primary_keys

_NO_TARGET: Final = "the target's family and number of layers are not known; give --target, or both"


@dataclass(frozen=True, slots=True)
class _Found:
    """What one engine makes of its input."""

    convention: str | None
    key: str | None
    ids: tuple[Any, ...] | None
    captured: Captured | None
    refusal: str | None


def of_file(
    config: Mapping[str, Any], facts: TargetFacts, trained: TrainedOn, known: Known
) -> tuple[Row, ...]:
    """What each engine captures when it reads this ``config.json``; readers of block drafters only theirs."""
    family, n_layers = facts.target.family, facts.target.n_layers
    block = any(for_block_drafters(key) for key in layer_ids(config))
    rows = []
    for reader in known.readers:
        if _is_for_blocks(reader.library, known.conventions) and not block:
            continue
        if family is None or n_layers is None:
            rows.append(_unknown(reader, reader.versions))
            continue
        read = reader.read(config, family, n_layers, known.conventions)
        found = _Found(read.convention, read.key, read.ids, read.captured, read.refusal)
        rows.append(_row(reader, reader.versions, "file", found, facts, trained, known.conventions))
    return _marked(rows)


def of_ids(
    ids: Sequence[int], key: str | None, facts: TargetFacts, trained: TrainedOn, conventions: Conventions
) -> tuple[Row, ...]:
    """What each library captures when it is given these integers under its own key.

    Args:
        ids: the integers.
        key: the key that they were written for; None for EAGLE-3's.  Other kinds of heads, such as block
            drafters, have other keys, and the two are not mixed.
        facts: the target.
        trained: what the head was trained on.
        conventions: those that are known.
    """
    n_layers = facts.target.n_layers
    if n_layers is None or facts.target.family is None:
        return ()
    rows = []
    for applying in applying_to(facts.target.family, conventions):
        convention = applying.convention
        if not _alike(convention, key, conventions):
            continue
        try:
            found = _Found(
                convention.name, convention.key, tuple(ids), convention.captured(ids, n_layers), None
            )
        except ConventionError as error:
            found = _Found(convention.name, convention.key, tuple(ids), None, why(error))
        rows.append(_row(convention, applying.versions, "ids", found, facts, trained, conventions))
    return _marked(rows)


def of_dump(facts: TargetFacts, trained: TrainedOn, conventions: Conventions) -> tuple[Row, ...]:
    """What each library must be told so that a head trained on a dump is fed its states."""
    n_layers, points = facts.target.n_layers, trained.points
    if n_layers is None or facts.target.family is None or points is None:
        return ()
    rows = []
    for applying in applying_to(facts.target.family, conventions):
        convention = applying.convention
        if not _alike(convention, None, conventions):
            continue
        try:
            ids = convention.from_points(points, n_layers)
            captured = convention.captured(ids, n_layers)
            found = _Found(convention.name, convention.key, tuple(ids), captured, None)
        except ConventionError as error:
            found = _Found(convention.name, None, None, None, why(error))
        rows.append(_row(convention, applying.versions, "told", found, facts, trained, conventions))
    return _marked(rows)


def requested(rows: Sequence[Row], wanted: str) -> tuple[Row, ...]:
    """The rows that ``--engine`` names: a library or a row's name, ``==`` a version; else its newest.

    Where bare ids are explained and both kinds of rows are there, those that give the library the ids count.

    Raises:
        ConventionError: no row speaks for it; with those there are.
    """
    name, exact, version = wanted.partition("==")
    of_name = [row for row in rows if name in (row.library, row.engine) or row.engine.startswith(f"{name}-")]
    of_name = [row for row in of_name if row.asked == "ids"] or of_name
    if exact:
        chosen = [row for row in of_name if version in Versions.parse(row.versions)]
    elif any(row.engine == name and row.library != name for row in of_name):
        chosen = [row for row in of_name if row.engine == name]
    else:
        chosen = [row for row in of_name if row.newest]
    if chosen:
        return tuple(chosen)
    listed = ", ".join(sorted({f"{row.engine} ({row.versions})" for row in of_name or rows})) or "none"
    raise ConventionError(f"what {wanted} captures was not established; known are: {listed}")


def _row(
    about: Reader | Convention,
    versions: str,
    asked: IdsFrom,
    found: _Found,
    facts: TargetFacts,
    trained: TrainedOn,
    conventions: Conventions,
) -> Row:
    n_layers, split = facts.target.n_layers, facts.split or frozenset()
    assert n_layers is not None
    captured = found.captured
    verdict = Verdict(outcome="fails", how=(found.refusal or "it stops",))
    if captured is not None:
        verdict = _verdict(captured.points, n_layers, split, trained)
        if verdict.outcome == "differs" and found.ids is None:
            own = ", ".join(str(one_spelling(point, n_layers, split)) for point in captured.points)
            how = f"it finds no ids that it reads, and takes layers of its own: {own}"
            verdict = Verdict(outcome="differs", how=(how, *(verdict.how if len(verdict.how) == 1 else ())))
    states = None if captured is None else tuple(state_of(p, n_layers, split) for p in captured.points)
    return Row(
        **_about(about, versions),
        asked=asked,
        newest=True,
        convention=found.convention,
        key=found.key,
        ids=None if found.ids is None else tuple(map(_plain, found.ids)),
        captured=states,
        silently=() if captured is None else captured.quirks,
        verdict=verdict,
        instead=None
        if verdict.outcome in ("same", "unknown") or asked == "told"
        else _instead(found, about.library, facts, trained, conventions),
    )


def _plain(value: Any) -> int | str:
    """An id as it stands in the file; what is no integer (``true``, ``1.5``, ``Infinity``) as text."""
    return value if type(value) is int else repr(value)


def _verdict(captured: Sequence[Point], n_layers: int, split: frozenset[int], trained: TrainedOn) -> Verdict:
    if trained.points is None:
        return Verdict(outcome="unknown", how=(trained.shown.by,))
    try:
        found = differences(trained.points, captured, n_layers, split)
    except SpecError as error:
        return Verdict(outcome="unknown", how=(f"cannot be known: {error}",))
    return Verdict(outcome="differs" if found else "same", how=found)


def _instead(
    found: _Found, library: str, facts: TargetFacts, trained: TrainedOn, conventions: Conventions
) -> str | None:
    """The ids to write for this engine, or why none do; None where it would fail on any."""
    family, n_layers = facts.target.family, facts.target.n_layers
    if trained.points is None or family is None or n_layers is None:
        return None
    try:
        name = found.convention
        chosen = convention_for(library, family, known=conventions) if name is None else conventions[name]
        return f"{chosen.key} = {chosen.from_points(trained.points, n_layers)}"
    except ConventionError as error:
        return None if found.captured is None else f"no ids would do: {why(error)}"


def _about(about: Reader | Convention, versions: str) -> dict[str, Any]:
    return {
        "engine": about.name,
        "library": about.library,
        "versions": versions,
        "rank": about.rank,
        "read_on": about.read_on,
        "source": about.source,
    }


def _unknown(about: Reader, versions: str) -> Row:
    verdict = Verdict(outcome="unknown", how=(f"cannot be known: {_NO_TARGET}",))
    return Row(**_about(about, versions), asked="file", newest=True, captured=None, verdict=verdict)


def _marked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, what was run before what was only read, each with whether a later version is there."""

    def last(row: Row) -> tuple[int, ...]:
        return Versions.parse(row.versions).last or release("99999")

    newest = {row.library: max(last(other) for other in rows if other.library == row.library) for row in rows}

    def order(row: Row) -> tuple[bool, str, tuple[int, ...], str]:
        run = any(other.rank == "verified" for other in rows if other.library == row.library)
        return (not run, row.library, tuple(-number for number in last(row)), row.engine)

    return tuple(
        row.model_copy(update={"newest": last(row) == newest[row.library]}) for row in sorted(rows, key=order)
    )


def _alike(convention: Convention, key: str | None, conventions: Conventions) -> bool:
    """Whether a convention is about the kind of head whose ids stand under ``key``."""
    if key is None or key in primary_keys(conventions):
        return convention.primary and not for_block_drafters(convention.key)
    return for_block_drafters(convention.key) == for_block_drafters(key)


def _is_for_blocks(library: str, conventions: Conventions) -> bool:
    """Whether a library knows block drafters alone."""
    keys = {convention.key for convention in in_force(conventions) if convention.library == library}
    return bool(keys) and all(for_block_drafters(key) for key in keys)
