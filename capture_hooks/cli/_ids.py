"""Layer ids as an option."""

from __future__ import annotations

import re

import typer


def parse_ids(text: str) -> list[int]:
    """Integers separated by commas or blanks, in brackets or not."""
    words = [word for word in re.split(r"[,\s]+", text.strip().strip("[]")) if word]
    if not words or any(not re.fullmatch(r"-?\d{1,9}", word, re.ASCII) for word in words):
        raise typer.BadParameter(f"{text!r} is no list of integers such as 2,30,58", param_hint="--ids")
    return [int(word) for word in words]
