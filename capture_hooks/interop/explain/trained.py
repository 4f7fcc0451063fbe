"""What a head was trained on, as its file or the user says; and what it may be where neither does.

In this order: a spec that the user gives; the head's capture section; a convention the user names
(``--written-for``); a layout of which one library alone is the writer (speculators).  A bare list of integers
in anyone else's layout says nothing: several trainers write the same key and mean different states by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ...conventions import BUILTIN, Convention, Conventions, Reader, convention_for
from ...conventions.contract import why
from ...conventions.lookup import in_force
from ...conventions.readers import builtin_readers
from ...conventions.versions import Versions, release
from ...errors import ConventionError, HeadError, SpecError
from ...heads.config import CaptureSection, in_order
from ...spec import CaptureSpec, Point
from ...store.manifest import Manifest
from ..dumps import FORMATS, DumpFormat
from .compare import state_of
from .report import Candidate, KnownTarget, Trained

_SPECULATORS: Final = "speculators"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of other libraries; by default what comes with the core.

    Attributes:
        conventions: what layer ids mean, by name.
        readers: how engines get to them from a head's config.
        formats: of dumps, by name.
    """

    conventions: Conventions = field(default_factory=lambda: BUILTIN)
    readers: Sequence[Reader] = field(default_factory=builtin_readers)
    formats: Mapping[str, DumpFormat] = field(default_factory=lambda: FORMATS)


@dataclass(frozen=True, slots=True)
class Applying:
    """A convention, and the versions in which it is the one that a lookup for the family finds."""

    convention: Convention
    versions: str


def applying_to(family: str, conventions: Conventions) -> tuple[Applying, ...]:
    """Every convention that some version of its library applies to ``family``, by name.

    A convention for all families gives way to one that names the family, in the versions that the other
    speaks for.
    """
    found: dict[str, list[str]] = {}
    for (library, key), versions in _known_versions(conventions).items():
        for version in versions:
            try:
                chosen = convention_for(library, family, key, version, conventions)
            except ConventionError:
                continue
            found.setdefault(chosen.name, []).append(version)
    by_name = {convention.name: convention for convention in in_force(conventions)}
    return tuple(Applying(by_name[name], _range(by_name[name], found[name])) for name in sorted(found))


def primary_keys(conventions: Conventions) -> tuple[str, ...]:
    """Where libraries keep EAGLE-3's ids."""
    return tuple(sorted({convention.key for convention in in_force(conventions) if convention.primary}))


def for_block_drafters(key: str) -> bool:
    """Whether a key belongs to drafters of whole blocks (DFlash, DSpark): heads of another kind."""
    return "target_layer_ids" in key


def _known_versions(conventions: Conventions) -> Mapping[tuple[str, str], list[str]]:
    """First and last versions that conventions speak for, ascending, by library and key."""
    ends: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for convention in in_force(conventions):
        spoken_for = Versions.parse(convention.versions)
        found = ends.setdefault((convention.library, convention.key), set())
        found |= {end for end in (spoken_for.first, spoken_for.last) if end is not None}
        if spoken_for.last is None:
            found.add(release("99999"))
    return {where: [".".join(map(str, end)) for end in sorted(found)] for where, found in ends.items()}


def _range(convention: Convention, versions: Iterable[str]) -> str:
    """The versions as a range; the convention's own text where it applies from its first to its last."""
    spoken_for = Versions.parse(convention.versions)
    ends = [release(version) for version in versions]
    whole = (spoken_for.first is None or spoken_for.first in ends) and (
        spoken_for.last is None or spoken_for.last in ends
    )
    if whole:
        return convention.versions
    first, last = (".".join(map(str, end)) for end in (min(ends), max(ends)))
    return first if first == last else f"{first} to {last}"


@dataclass(frozen=True, slots=True)
class TrainedOn:
    """What is known of it.

    Attributes:
        points: the states in the order of ``fc``'s columns; None where unknown.
        shown: the same as a report shows it.
        library: whose ids they were read from; None where it was by other means.
    """

    points: tuple[Point, ...] | None
    shown: Trained
    library: str | None = None


def by_section(section: CaptureSection) -> TrainedOn:
    """What the capture section states: the inputs in the file's order; unknown if that cannot be."""
    spec = section.capture_spec
    if sorted(section.order) != list(range(len(spec.inputs))):
        shown = f"its capture.order {section.order} is no permutation of its {len(spec.inputs)} inputs"
        return TrainedOn(None, Trained(inputs=None, by=f"cannot be known: {shown}"))
    return _known(
        in_order(spec, section.order), section.target.n_layers, f"its capture section ({section.written_by})"
    )


def by_manifest(manifest: Manifest) -> TrainedOn:
    """The slots that a dump itself states, in the order of its columns."""
    return _known(manifest.spec.inputs, manifest.n_layers, "the dump's manifest")


def by_spec(spec: CaptureSpec, n_layers: int | None) -> TrainedOn:
    """What the user states with ``--spec``.

    Raises:
        SpecError: a layer that the target does not have, or the number of layers is not known.
    """
    if n_layers is None:
        raise SpecError(
            "a spec can be compared only when the target's layers are known; give --target or --layers"
        )
    spec.resolve(n_layers)
    return _known(spec.absolute(n_layers).inputs, n_layers, "--spec")


def by_final_state() -> TrainedOn:
    """A head that takes no intermediate states: what ``lm_head`` is fed, alone."""
    return _known((Point("final_norm"),), 1, "eagle_config.use_aux_hidden_state = false")


def by_convention(
    name: str, ids: Mapping[str, Any], target: KnownTarget, conventions: Conventions
) -> TrainedOn:
    """The meaning of the ids to the library that they are said to be written for.

    Args:
        name: a convention, or a library, of whose conventions the target's family picks one.
        ids: every list of layer ids in the file, by dotted key.
        target: the target.
        conventions: those that are known.

    Raises:
        PluginError: no such convention.
        ConventionError: several apply, or the ids mean nothing exact to it; with why.
        HeadError: the target is not known, or the ids are no list of integers.
    """
    return _by(f"--written-for {name}", named(name, target, conventions, ids), ids, target)


def _by(who: str, chosen: Convention, ids: Mapping[str, Any], target: KnownTarget) -> TrainedOn:
    n_layers = needed(target)
    found = ids.get(chosen.key)
    by = f"{who}: {chosen.name} {chosen.versions}, "
    if found is None:
        points, by = chosen.default(n_layers).points, f"{by}its default layers, as {chosen.key} is missing"
    else:
        points, by = chosen.to_points(whole_numbers(chosen.key, found), n_layers), f"{by}{chosen.key}"
    return replace(_known(points, n_layers, by), library=chosen.library)


def by_layout(ids: Mapping[str, Any], target: KnownTarget, conventions: Conventions) -> TrainedOn:
    """The one convention of a speculators head.

    Raises:
        ConventionError: the ids mean nothing exact to it.
        HeadError: the target is not known, or the ids are no list of integers.
    """
    return _by("its layout", named(_SPECULATORS, target, conventions, ids), ids, target)


def unknown(why: str, ids: Mapping[str, Any], target: KnownTarget, conventions: Conventions) -> TrainedOn:
    """Not known: what the ids would mean to each convention that reads one of the keys in the file."""
    candidates = tuple(_candidates(ids, target, conventions))
    return TrainedOn(None, Trained(inputs=None, by=f"cannot be known: {why}", candidates=candidates))


def named(name: str, target: KnownTarget, conventions: Conventions, ids: Collection[str] = ()) -> Convention:
    """The convention of that name, or the one of that library that the target's family picks.

    Where the library reads several keys it is the one that is there (``ids``), else its EAGLE-3 list.

    Raises:
        PluginError: there is neither.
        ConventionError: several of the library apply, or which does depends on a family that is not known.
    """
    if name in conventions or name not in {convention.library for convention in conventions.values()}:
        return conventions[name]
    if target.family is None:
        raise ConventionError(
            f"which of {name}'s conventions applies depends on the target's family; give --target or --family"
        )
    keys = {convention.key for convention in conventions.values() if convention.library == name}
    present = sorted(keys & set(ids))
    key = present[0] if len(present) == 1 else None
    return convention_for(name, target.family, key, known=conventions)


def needed(target: KnownTarget) -> int:
    """The target's number of layers.

    Raises:
        HeadError: it is not known.
    """
    if target.n_layers is None:
        raise HeadError("the target's number of layers is not known; give --target, or --layers and --family")
    return target.n_layers


def whole_numbers(key: str, ids: Any) -> list[int]:
    """Ids as a list of integers.

    Raises:
        HeadError: they are something else.
    """
    if not isinstance(ids, list | tuple) or not ids or any(type(number) is not int for number in ids):
        raise HeadError(f"{key} is {str(ids)[:80]!r}, not a list of integers")
    return list(ids)


def _known(points: Sequence[Point], n_layers: int, by: str) -> TrainedOn:
    inputs = tuple(state_of(point, n_layers) for point in points)
    return TrainedOn(tuple(points), Trained(inputs=inputs, by=by))


def _candidates(ids: Mapping[str, Any], target: KnownTarget, conventions: Conventions) -> Iterator[Candidate]:
    """Every convention of the keys that are there, in all its versions."""
    if target.n_layers is None or target.family is None:
        return
    for applying in applying_to(target.family, conventions):
        convention = applying.convention
        found = ids.get(convention.key)
        if found is None:
            continue
        about: dict[str, Any] = {
            "convention": convention.name,
            "versions": applying.versions,
            "rank": convention.rank,
            "read_on": convention.read_on,
        }
        try:
            points = convention.to_points(whole_numbers(convention.key, found), target.n_layers)
            shown = tuple(state_of(point, target.n_layers) for point in points)
            yield Candidate(**about, inputs=shown)
        except ConventionError as error:
            yield Candidate(**about, inputs=None, refusal=why(error))
        except (HeadError, SpecError) as error:
            yield Candidate(**about, inputs=None, refusal=str(error))
