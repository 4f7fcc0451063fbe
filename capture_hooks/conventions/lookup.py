"""Finding the convention that applies, and asking whether an engine can be told what a head eats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConventionError
from ..plugins import registry
from ..spec import Point
from .contract import Convention
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


def convention(name: str) -> Convention:
    """The installed convention of that name.

    Raises:
        PluginError: there is none; the message lists those there are, and the plugins that are broken.
    """
    return registry().conventions[name]


def convention_for(
    library: str, model_type: str, key: str | None = None, version: str | None = None
) -> Convention:
    """The convention by which ``library`` reads layer ids for targets of ``model_type``.

    Args:
        library: such as ``"sglang"``.
        model_type: the target's ``config.model_type``.
        key: where the ids stand, needed when a library has several keys.
        version: the library's; None for the newest that a convention speaks for.

    Raises:
        ConventionError: none is installed, none speaks for that version, or several apply.
    """
    known = registry().conventions.values()
    where = f"{library}'s {key}" if key else library
    of_library = [c for c in known if c.library == library and key in (None, c.key)]
    if version is not None and of_library:
        spoken_for = [c for c in of_library if version in Versions.parse(c.versions)]
        if not spoken_for:
            ranges = "; ".join(sorted({c.versions for c in of_library}))
            raise ConventionError(
                f"what {where} means in version {version} was not established (versions that were: {ranges})"
            )
        of_library = spoken_for
    named = [c for c in of_library if model_type in c.families]
    found = _newest(named or [c for c in of_library if not c.families])
    if not found:
        libraries = ", ".join(sorted({c.library for c in known}))
        raise ConventionError(
            f"no convention is installed for {where} and {model_type!r} (libraries: {libraries})"
        )
    if len(found) > 1:
        several = ", ".join(f"{c.name} ({c.key})" for c in found)
        raise ConventionError(
            f"several conventions apply to {where} and {model_type!r}: {several}; name the key"
        )
    return found[0]


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


def _newest(found: list[Convention]) -> list[Convention]:
    """Those that speak for the newest version of their key."""

    def last(candidate: Convention) -> tuple[int, ...]:
        return Versions.parse(candidate.versions).last or release("99999")

    return [c for c in found if last(c) == max(last(other) for other in found if other.key == c.key)]
