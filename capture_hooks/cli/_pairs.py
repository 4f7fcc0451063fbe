"""``KEY=VALUE`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer


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
