"""Which conventions speak for a family of targets, and for which of their versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...conventions import BUILTIN, Convention, Conventions, Reader, convention_for
from ...conventions.lookup import in_force
from ...conventions.readers import builtin_readers
from ...conventions.versions import Versions, release
from ...errors import ConventionError
from ..dumps import FORMATS, DumpFormat


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
