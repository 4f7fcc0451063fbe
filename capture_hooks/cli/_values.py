"""Values that are written in one word: a list of layer ids, ``KEY=VALUE``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import typer


def parse_ids(text: str) -> list[int]:
    """Integers separated by commas or blanks, in brackets or not."""
    words = re.split(r"\s*,\s*|\s+", text.strip().removeprefix("[").removesuffix("]").strip())
    if any(not re.fullmatch(r"-?\d{1,9}", word, re.ASCII) for word in words):
        raise typer.BadParameter(f"{text!r} is no list of integers such as 2,30,58", param_hint="--ids")
    return [int(word) for word in words]


def pairs(texts: Sequence[str] | None, option: str) -> dict[str, Any]:
    """``KEY=VALUE`` texts as a dictionary; a value is JSON where it reads as JSON, else text.

    Raises:
        BadParameter: naming ``option`` and the text that is not a pair.
    """
    found: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{text!r} is not KEY=VALUE", param_hint=option)
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found
