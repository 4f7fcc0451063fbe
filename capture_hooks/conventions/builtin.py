"""The conventions and readers that come with the core: the rows of ``ids.toml``, each with its rule."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any

from .contract import Reader
from .readers import READERS, Sglang
from .rules import RULES, Rule, Through
from .versions import Versions


@functools.cache
def rows() -> tuple[Rule, ...]:
    """Every convention of the core, in the table's order."""
    made: list[Rule] = []
    for group in _file()["group"]:
        shared = {field: value for field, value in group.items() if field not in ("row", "copy")}
        if "copy" in group:
            made += _copies(_fields(shared), tuple(made), **group["copy"])
        for row in group.get("row", ()):
            fields = _fields({**shared, **row})
            made.append(RULES[fields.pop("rule")](**fields))
    return tuple(made)


def readers() -> list[Reader]:
    """How engines read a head's ``config.json``."""
    made: list[Reader] = []
    for row in _file()["reader"]:
        fields = _fields(row)
        reader = READERS[fields.pop("rule")](**fields)
        made += reader.in_runs(rows()) if isinstance(reader, Sglang) else [reader]
    return made


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


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values as a rule takes them: words and groups of families spelled out, lists as tuples."""
    return {key: _spelled(key, value) for key, value in row.items()}


def _spelled(key: str, value: Any) -> Any:
    if isinstance(value, str):
        words = _file()["words"]
        while (spelled := re.sub(r"\{(\w+)\}", lambda m: words.get(m[1], m[0]), value)) != value:
            value = spelled
        return value
    if key == "families":
        groups = _file()["families"]
        return tuple(f for name in value for f in (groups[name[1:]] if name.startswith("@") else [name]))
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("ids.toml").read_text(encoding="utf-8"))
