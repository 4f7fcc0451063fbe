"""Where the errors of transformers, safetensors and PEFT on a model become one of ours."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from ..errors import ModelError
from ..foreign import calling


def reading(model: str) -> AbstractContextManager[None]:
    """Reading what ``model`` names.

    Raises:
        ModelError: for whatever a missing, damaged or unknown model makes these libraries raise.
    """
    return calling(f"cannot load the model {model}", ModelError)


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
