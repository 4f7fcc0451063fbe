"""Ranges of versions: read, refused, and what lies inside them."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.conventions.versions import Versions, joined, release
from capture_hooks.errors import ConventionError
from capture_hooks.plugins import build_registry

numbers = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(tuple)


def text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


@given(numbers, numbers, numbers)
def test_a_version_is_inside_where_it_lies_between(
    low: tuple[int, ...], high: tuple[int, ...], version: tuple[int, ...]
) -> None:
    found = text(version) in Versions.parse(f"{text(low)} to {text(high)}")
    assert found == (low <= version and version[: len(high)] <= high)


@given(numbers)
def test_both_ends_are_included_and_open_sides_are_open(number: tuple[int, ...]) -> None:
    one = text(number)
    for written in (one, f"{one} to {one}", f"to {one}", f"{one} to "):
        assert one in Versions.parse(written), written
    assert "999" in Versions.parse(f"{one} to ")
    assert "0" in Versions.parse(f"to {one}")


@pytest.mark.parametrize(
    ("version", "written", "inside"),
    [
        ("0.5.23.post1", "0.5.23", True),
        ("0.5.23", "0.5.9 to 0.5.23", True),
        ("0.5.9", "0.5.10 to 0.5.23", False),
        ("0.5.24", "0.5.9 to 0.5.23", False),
        ("2.13.0+cpu", "2.13", True),
        ("2.14.0", "2.13", False),
        ("0.32.0rc1", "0.32.0", True),
        ("0.3.0", "to 0.3.0", True),
        ("0.3.1", "to 0.3", True),
        ("2026.8.22", "2026.8.22", True),
    ],
)
def test_cases(version: str, written: str, inside: bool) -> None:
    assert (version in Versions.parse(written)) is inside


@pytest.mark.parametrize(
    "written", ["", "  ", " to ", "newest", "1.2 to latest", "1..2", "v1.2", "1.2 - 1.3"]
)
def test_what_is_no_range_is_refused_with_its_text(written: str) -> None:
    with pytest.raises(ConventionError, match=r"is no (range of versions|version such as)"):
        Versions.parse(written)


@given(st.text(max_size=12))
def test_reading_is_total(written: str) -> None:
    for read in (Versions.parse, release):
        with contextlib.suppress(ConventionError):  # any other exception fails
            read(written)


@pytest.mark.parametrize("name", sorted(build_registry(entry_points=()).conventions))
def test_every_convention_speaks_for_a_range(name: str) -> None:
    stated = build_registry(entry_points=()).conventions[name].versions
    found = Versions.parse(stated)
    assert found.first is None or found.last is None or found.first <= found.last, stated


@pytest.mark.parametrize("name", sorted(build_registry(entry_points=()).readers))
def test_every_reader_speaks_for_a_range(name: str) -> None:
    Versions.parse(build_registry(entry_points=()).readers[name].versions)


@given(st.sets(st.integers(0, 30), min_size=1), st.data())
def test_joined_ranges_hold_the_same_releases_and_no_others(releases: set[int], data: st.DataObject) -> None:
    ordered, ranges = sorted(releases), []
    while ordered:
        most = next((i for i, patch in enumerate(ordered) if patch != ordered[0] + i), len(ordered))
        taken = data.draw(st.integers(1, most))
        first, last = ordered[0], ordered[taken - 1]
        ranges.append(f"0.5.{first} to 0.5.{last}" if first < last else f"0.5.{first}")
        ordered = ordered[taken:]
    parts = joined(data.draw(st.permutations(ranges))).split(", ")
    inside = {patch for patch in range(32) if any(f"0.5.{patch}" in Versions.parse(part) for part in parts)}
    assert inside == releases
    # Nothing that touches is left apart.
    gaps = sum(patch + 1 not in releases for patch in releases)
    assert len(parts) == gaps


def test_a_release_that_may_lie_between_keeps_ranges_apart() -> None:
    assert joined(["0.25.1 to 0.26.0", "0.17.0 to 0.24.0"]) == "0.17.0 to 0.24.0, 0.25.1 to 0.26.0"
    assert joined(["0.30.0", "0.22.0 to 0.29.0"]) == "0.22.0 to 0.30.0"
