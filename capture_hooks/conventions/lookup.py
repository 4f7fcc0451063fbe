"""The conventions that are known: the rows of ``ids.toml``, and how to find and ask the one that applies.

Where others are installed, the functions take all of them as ``known``; without it they ask the core's own.
"""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, Final

from ..errors import ConventionError
from ..spec import Point
from .contract import Captured, Convention, Conventions
from .rules import RULES, Rule, Through
from .versions import Versions, release


@functools.cache
def table() -> Mapping[str, Any]:
    """``ids.toml``, whose ``reader`` part is for `readers`."""
    return tomllib.loads(resources.files(__package__).joinpath("ids.toml").read_text(encoding="utf-8"))


@functools.cache
def rows() -> tuple[Rule, ...]:
    """Every convention of the core, in the table's order."""
    made: list[Rule] = []
    for group in table()["group"]:
        shared = {field: value for field, value in group.items() if field not in ("row", "copy")}
        if "copy" in group:
            made += _copies(spelled_out(shared), tuple(made), **group["copy"])
        for row in group.get("row", ()):
            found = spelled_out({**shared, **row})
            made.append(RULES[found.pop("rule")](**found))
    return tuple(made)


class _UnknownError(ConventionError, KeyError):
    __str__ = Exception.__str__  # KeyError would print the message quoted


class _Builtin(Conventions):
    """The core's own conventions by name; made from the table when they are first asked for."""

    @functools.cached_property
    def _by_name(self) -> Mapping[str, Convention]:
        return {row.name: row for row in sorted(rows(), key=lambda row: row.name)}

    def __getitem__(self, name: str) -> Convention:
        if name not in self._by_name:
            raise _UnknownError(_unknown("convention", name, self._by_name))
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


#: The core's own conventions by name.
BUILTIN: Final[Conventions] = _Builtin()


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
        convention: the one that was asked.
        points: what the ids mean, exactly; None where they mean nothing to this library.
        captured: what it does with them, meant or not; None where it fails.
        refusal: why they mean nothing, and how the library fails where it does; None where they mean points.
    """

    convention: Convention
    points: tuple[Point, ...] | None
    captured: Captured | None
    refusal: str | None


def convention_for(
    library: str,
    model_type: str,
    key: str | None = None,
    version: str | None = None,
    known: Conventions = BUILTIN,
) -> Convention:
    """The convention by which ``library`` reads layer ids for targets of ``model_type``.

    Args:
        library: such as ``"sglang"``.
        model_type: the target's ``config.model_type``.
        key: where the ids stand; None for the library's EAGLE-3 list (`Convention.primary`).
        version: the library's; None for the newest that a convention speaks for.
        known: the conventions to choose from.

    Raises:
        ConventionError: none is known, none speaks for that version, or several apply; the message
            lists what there is.
    """
    among = in_force(known)
    of_library = [c for c in among if c.library == library]
    if not of_library:
        raise ConventionError(_unknown("library", library, {c.library for c in among}))
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


def meanings(
    ids: Sequence[int],
    model_type: str,
    n_layers: int,
    key: str | None = None,
    version: str | None = None,
    known: Conventions = BUILTIN,
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
        known: the conventions to ask.
    """
    answers = []
    for library in sorted({c.library for c in in_force(known)}):
        try:
            chosen = convention_for(library, model_type, key, version, known)
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
    library: str,
    points: Sequence[Point],
    n_layers: int,
    model_type: str,
    key: str | None = None,
    known: Conventions = BUILTIN,
) -> EngineIds:
    """The ids that make ``library`` capture ``points``, or why it cannot.

    Raises:
        ConventionError: no convention is known for this library and model type.
    """
    chosen = convention_for(library, model_type, key, known=known)
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


def in_force(known: Conventions = BUILTIN) -> tuple[Convention, ...]:
    """The known conventions without those that another one replaces (`Convention.overrides`).

    Raises:
        ConventionError: two replace the same one, or one replaces what is not there or not its own key's.
    """
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


def _copies(
    fields: Mapping[str, Any], made: Sequence[Rule], library: str, key: str, version: str, name: str
) -> Iterator[Rule]:
    """What another list's conventions become under another key, or in a library that hands ids on to them.

    Args:
        fields: what is different in all of them.  ``{source}`` and ``{limits}`` stand for the original's own;
            without a rule, ``versions`` is the first that has the key.
        made: the conventions so far.
        library: whose conventions they are.
        key: of which of its lists.
        version: those that speak for this version.
        name: what stands in place of the library in their names.
    """
    for one in made:
        if (one.library, one.key) != (library, key) or version not in Versions.parse(one.versions):
            continue
        kind = one.name.removeprefix(library).partition("-")[0]
        about = {"name": f"{name}{kind}", **fields}
        for field in ("source", "limits"):
            about[field] = about[field].replace("{" + field + "}", getattr(one, field))
        if about.pop("rule", None) == "through":
            same = {field: getattr(one, field) for field in ("families", "order", "primary", "rank", "key")}
            yield Through(through=one, **{**same, **about})
            continue
        since, _, last = one.versions.partition(" to ")
        about["versions"] = f"{max(since, fields['versions'])} to {last}"
        yield replace(one, **{field: value for field, value in about.items() if hasattr(one, field)})


def spelled_out(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values as a rule takes them: words and groups of families spelled out, lists as tuples."""
    return {key: _spelled(key, value) for key, value in row.items()}


def _spelled(key: str, value: Any) -> Any:
    if isinstance(value, str):
        words = table()["words"]
        while (spelled := re.sub(r"\{(\w+)\}", lambda m: words.get(m[1], m[0]), value)) != value:
            value = spelled
        return value
    if key == "families":
        groups = table()["families"]
        return tuple(f for name in value for f in (groups[name[1:]] if name.startswith("@") else [name]))
    return tuple(value) if isinstance(value, list) else value
