"""Where what outside libraries and files raise becomes an error of ours.

Nothing here decides what is right: an error becomes one line, of a class of `errors`, and stays its cause.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from .errors import CaptureHooksError

#: Errors whose text says what happened without their name.
_SPEAKING: Final = (OSError, ValueError, ImportError)


@contextmanager
def calling(what: str, kind: type[CaptureHooksError]) -> Iterator[None]:
    """A block that hands to an outside library what a user gave; only such calls belong in it.

    Raises:
        kind: ``what`` and the reason, for whatever the block raises; errors of ours pass as they are.
    """
    try:
        yield
    except CaptureHooksError:
        raise
    except Exception as error:  # libraries raise of any class on what they cannot use
        raise kind(f"{what}: {told(error)}") from error


def told(error: Exception) -> str:
    """The first line of an error's text, with the error's name where the text alone says little."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    speaking = isinstance(error, _SPEAKING) and not isinstance(error, UnicodeError)
    return first if speaking else f"{type(error).__name__}: {first}"


def read_text(path: Path, what: str, kind: type[CaptureHooksError]) -> str:
    """A small file of UTF-8 text.

    Args:
        path: of the file; a pipe or a device, which could be read for ever, is not opened.
        what: it is, for the message: "the chat template".
        kind: the error to raise.

    Raises:
        kind: there is no such file, it cannot be read, or it is not UTF-8.
    """
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.read_text(encoding="utf-8")
        why = "it is no regular file"
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:  # a name with a null byte
        why = str(error)
    raise kind(f"cannot read {what} {path}: {why}")


def parse_json(text: str | bytes, where: str, kind: type[CaptureHooksError]) -> Any:
    """A JSON document.

    Raises:
        kind: it is malformed, nested too deep for Python's reader, or holds an integer too long for Python.
    """
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise kind(f"{where}: {json_fault(error)}") from None


def json_fault(error: RecursionError | ValueError) -> str:
    """What is wrong with a JSON text, by what ``json.loads`` raised on it."""
    if isinstance(error, RecursionError):
        return "JSON that is nested too deep"
    if isinstance(error, json.JSONDecodeError):
        at = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        return f"malformed JSON: {error.msg} at {at}"
    return f"malformed JSON: {error}"  # bytes that are not UTF-8; an integer of thousands of digits
