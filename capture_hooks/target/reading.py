"""Where the errors of transformers, safetensors and PEFT on a model become one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from ..errors import CaptureHooksError, ModelError

#: Errors whose text says what happened without their name.
_SPEAKING: Final = (OSError, ValueError, ImportError)


@contextmanager
def reading(model: str) -> Iterator[None]:
    """Reading what ``model`` names.

    Raises:
        ModelError: for whatever a missing, damaged or unknown model makes these libraries raise.
    """
    try:
        yield
    except CaptureHooksError:
        raise
    except Exception as error:  # a damaged file ends in errors of any class
        raise ModelError(f"cannot load the model {model}: {told(error)}") from error


def transformers_here() -> Any:
    """The module ``transformers``.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModelError("reading a model needs transformers: pip install transformers") from None
    return transformers


def told(error: Exception) -> str:
    """The first line of an error's text, with the error's name where the text alone says little."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    speaking = isinstance(error, _SPEAKING) and not isinstance(error, UnicodeError)
    return first if speaking else f"{type(error).__name__}: {first}"
