"""Hypothesis strategies for malformed JSON, to test the errors of whatever reads it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

from hypothesis import strategies as st

__all__ = ["damaged_json", "nonsense_json"]

#: Wrong values for a field: of another type, empty, out of range, not Unicode.
_NONSENSE: Final[tuple[Any, ...]] = (
    *(None, True, False, -1, 0, 1, 7, 0.5, 10**30, "", " ", "abc", "null", "[]", "{", "é", "\0", "\ud800"),
    *("9" * 400, "{{ x }}", [], {}, [None], [[]], {"": None}, {"a": {"b": []}}, ["a", 1], float("inf")),
)


def nonsense_json() -> st.SearchStrategy[Any]:
    """Any JSON value (Python's: infinity and lone surrogates too)."""
    leaves = st.sampled_from(_NONSENSE) | st.text(max_size=5) | st.integers() | st.floats()
    return leaves | st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )


@st.composite
def damaged_json(draw: st.DrawFn, document: Any, values: Sequence[Any] = _NONSENSE) -> Any:
    """A copy of a JSON document with one value, at any depth, replaced by one of ``values``, or left out."""
    document = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []

    def visit(value: Any, depth: int) -> None:
        inside = (
            value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
        )
        for key, inner in list(inside)[:200]:
            places.extend([(value, key)] * (3 if depth < 2 else 1))
            visit(inner, depth + 1)

    visit(document, 0)
    if not places:
        return draw(st.sampled_from(values))
    owner, key = draw(st.sampled_from(places))
    if draw(st.integers(0, 4)) == 0:
        del owner[key]
    else:
        owner[key] = copy.deepcopy(draw(st.sampled_from(values)))
    return document
