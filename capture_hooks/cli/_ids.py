"""Layer ids as an option."""

from __future__ import annotations

import re

import typer


def parse_ids(text: str) -> list[int]:
    """Integers separated by commas or blanks, in brackets or not."""
    words = re.split(r"\s*,\s*|\s+", text.strip().removeprefix("[").removesuffix("]").strip())
    if any(not re.fullmatch(r"-?\d{1,9}", word, re.ASCII) for word in words):
        raise typer.BadParameter(f"{text!r} is no list of integers such as 2,30,58", param_hint="--ids")
    return [int(word) for word in words]
