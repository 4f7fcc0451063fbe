"""docs/conventions.md shows what the conventions say, all of them."""

import sys
from pathlib import Path

import pytest

from capture_hooks.plugins import build_registry

sys.path.insert(0, str(Path(__file__).parent))

import conventions_tables

TEXT = conventions_tables.PAGE.read_text()


@pytest.mark.parametrize("name", sorted(build_registry(entry_points=()).conventions))
def test_every_convention_has_a_row(name: str) -> None:
    assert f"\n| `{name}` | " in TEXT


@pytest.mark.parametrize("name", sorted(build_registry(entry_points=()).readers))
def test_every_reader_has_a_row(name: str) -> None:
    assert f"\n| `{name}` | " in TEXT


def test_the_tables_are_what_the_conventions_answer() -> None:
    _, _, rest = TEXT.partition(conventions_tables.BEGIN)
    shown, _, _ = rest.partition(conventions_tables.END)
    assert shown.strip() == conventions_tables.tables().strip(), (
        "the page is older than the conventions: run python tests/docs/conventions_tables.py"
    )
