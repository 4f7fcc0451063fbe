"""Finding the convention that applies, and asking what ids mean to it, or to all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConventionError
from ..plugins import registry
from ..spec import Point
from .contract import Captured, Convention
from .versions import Versions, release


@dataclass(frozen=True, slots=True)
class EngineIds:
    """How one engine is told which states to capture.

    Attributes:
        convention: what the ids mean.
        ids: the ids to write under ``convention.key``; None when the engine cannot capture these points.
        excluded: why it cannot, in one sentence; None when it can.
    """

    convention: Convention
    ids: list[int] | None
    excluded: str | None


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one convention makes of a list of ids.

    Attributes:
        convention: whose reading it is.
        points: what the ids mean, exactly; None where they mean nothing to this library.
        captured: what it does with them, meant or not; None where it fails.
        refusal: why they mean nothing, and how the library fails where it does; None where they mean points.
    """

    convention: Convention
    points: tuple[Point, ...] | None
    captured: Captured | None
    refusal: str | None


def convention(name: str) -> Convention:
    """The installed convention of that name, also where another replaces it in lookups.

    Raises:
        PluginError: there is none; the message lists those there are, and the plugins that are broken.
    """
    found: Convention = registry().conventions[name]
    return found


def convention_for(
    library: str, model_type: str, key: str | None = None, version: str | None = None
) -> Convention:
    """The convention by which ``library`` reads layer ids for targets of ``model_type``.

    Args:
        library: such as ``"sglang"``.
        model_type: the target's ``config.model_type``.
        key: where the ids stand; None for the library's EAGLE-3 list (`Convention.primary`).
        version: the library's; None for the newest that a convention speaks for.

    Raises:
        ConventionError: none is installed, none speaks for that version, or several apply; the message
            lists what there is.
    """
    known = in_force()
    of_library = [c for c in known if c.library == library]
    if not of_library:
        raise ConventionError(_unknown("library", library, {c.library for c in known}))
    of_key = [c for c in of_library if (c.primary if key is None else c.key == key)]
    if not of_key:
        what = f"no convention of {library} is its primary one" if key is None else ""
        raise ConventionError(what or _unknown(f"key of {library}", str(key), {c.key for c in of_library}))
    where = f"{library}'s {key}" if key else library
    if version is not None and not _speaking(of_key, version):
        ranges = "; ".join(sorted({c.versions for c in of_key}))
        raise ConventionError(
            f"what ids under {where} mean in version {version} was not established "
            f"(versions that were: {ranges})"
        )
    found: list[Convention] = []
    for spoken_for in [version] if version is not None else _newest_first(of_key):
        speaking = _speaking(of_key, spoken_for)
        named = [c for c in speaking if model_type in c.families]
        if found := named or [c for c in speaking if not c.families]:
            break
    if not found:
        families = ", ".join(sorted({family for c in of_key for family in c.families}))
        raise ConventionError(
            f"no convention is installed for {where} and the family {model_type!r} (families: {families})"
        )
    if len(found) > 1:
        several = ", ".join(f"{c.name} ({c.key})" for c in found)
        raise ConventionError(
            f"several conventions apply to {where} and {model_type!r}: {several}; name the key"
        )
    return found[0]


def readings(
    ids: Sequence[int], model_type: str, n_layers: int, key: str | None = None, version: str | None = None
) -> tuple[Meaning, ...]:
    """What every library would make of ``ids`` for a target of this family, by library and convention.

    Total: a convention answers with points, with what it would do instead, or with a refusal.  A library that
    has no convention for the family, the key or the version is left out.

    Args:
        ids: as they stand in a config, of any type.
        model_type: the target's ``config.model_type``.
        n_layers: the target's decoder layers.
        key: only conventions of this key; None for each library's EAGLE-3 list.
        version: only conventions that speak for it, which makes sense beside a key of one library.
    """
    answers = []
    for library in sorted({c.library for c in in_force()}):
        try:
            chosen = convention_for(library, model_type, key, version)
        except ConventionError:
            continue
        answers.append(meaning(chosen, ids, n_layers))
    return tuple(answers)


def meaning(chosen: Convention, ids: Sequence[int], n_layers: int) -> Meaning:
    """What ``chosen`` makes of ``ids``; total."""
    points, captured, refusal = None, None, None
    try:
        points = chosen.to_points(ids, n_layers)
    except ConventionError as error:
        refusal = str(error)
    try:
        captured = chosen.captured(ids, n_layers)
    except ConventionError as error:
        refusal = str(error)
    return Meaning(chosen, points, captured, refusal)


def engine_ids(
    library: str, points: Sequence[Point], n_layers: int, model_type: str, key: str | None = None
) -> EngineIds:
    """The ids that make ``library`` capture ``points``, or why it cannot.

    Raises:
        ConventionError: no convention is installed for this library and model type.
    """
    chosen = convention_for(library, model_type, key)
    try:
        return EngineIds(chosen, chosen.from_points(points, n_layers), None)
    except ConventionError as error:
        return EngineIds(chosen, None, str(error))


def require_verified(chosen: Convention, accept_unverified: bool) -> None:
    """Stop where something would be written on the word of a convention that was only read.

    Raises:
        ConventionError: its rank is *read*, and that was not accepted.
    """
    if chosen.rank != "verified" and not accept_unverified:
        raise ConventionError(
            f"what ids mean to {chosen.library} {chosen.versions} was read from its source on "
            f"{chosen.read_on} ({chosen.source}) and never compared with its running code; "
            "--accept-unverified goes on all the same"
        )


def in_force() -> tuple[Convention, ...]:
    """The installed conventions without those that another one replaces (`Convention.overrides`).

    Raises:
        ConventionError: two replace the same one, or one replaces what is not there or not its own key's.
    """
    known: Mapping[str, Convention] = registry().conventions
    replaced: dict[str, Convention] = {}
    for chosen in known.values():
        name = chosen.overrides
        if name is None:
            continue
        if name not in known or known[name] is chosen:
            raise ConventionError(
                f"the convention {chosen.name!r} is there to replace another, but "
                + _unknown("convention", name, set(known) - {chosen.name})
            )
        old = known[name]
        if (old.library, old.key) != (chosen.library, chosen.key):
            raise ConventionError(
                f"the convention {chosen.name!r} ({chosen.library}, {chosen.key}) replaces {name!r}, "
                f"which is about something else ({old.library}, {old.key})"
            )
        if name in replaced:
            raise ConventionError(
                f"{replaced[name].name!r} and {chosen.name!r} both replace the convention {name!r}; "
                "leave one out by CAPTURE_HOOKS_DISABLE_PLUGINS"
            )
        replaced[name] = chosen
    return tuple(c for c in known.values() if c.name not in replaced)


def _speaking(among: Iterable[Convention], version: str) -> list[Convention]:
    return [c for c in among if version in Versions.parse(c.versions)]


def _newest_first(among: Iterable[Convention]) -> list[str]:
    """The last version that each speaks for; an open range counts as later than any."""
    lasts = {Versions.parse(c.versions).last or release("99999") for c in among}
    return [".".join(map(str, last)) for last in sorted(lasts, reverse=True)]


def _unknown(what: str, name: str, there_are: Iterable[str]) -> str:
    names = sorted(there_are)
    near = difflib.get_close_matches(name, names, n=1)
    return f"no {what} {name!r} is known (there are: {', '.join(names) or 'none'})" + (
        f"; did you mean {near[0]!r}?" if near else ""
    )
