"""Settings as annotated dataclasses, checked by pydantic against their own annotations."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any, Final, get_type_hints

from .errors import CaptureHooksError

#: Settings that a message can list and still be read.
_MOST_LISTED: Final = 40


def check_fields(settings: Any, kind: type[CaptureHooksError], prefix: str = "") -> None:
    """Check each field's type and bounds (``Annotated[int, Field(gt=0)]``); nothing is converted.

    Args:
        settings: an instance of a dataclass, usually from its ``__post_init__``.
        kind: the error to raise.
        prefix: before a field's name in the message.

    Raises:
        kind: naming the first field that does not fit, its value and what it must be.
    """
    from pydantic import ValidationError

    for name, check in _checks(settings.__class__).items():
        value = getattr(settings, name)
        try:
            check.validate_python(value)
        except ValidationError as error:
            # A field that may also be None has a complaint for each of its types; the first will do.
            told = error.errors(include_url=False)[0]["msg"].replace("Input should be", "must be")
            shown = str(value) if isinstance(value, int | float) else repr(value)
            raise kind(f"{prefix}{name} {told}, not {shown[:60]}") from None


def check_names(
    owner: str, given: Iterable[str], known: Collection[str], kind: type[CaptureHooksError]
) -> None:
    """Check that ``owner`` has every setting that was given.

    Raises:
        kind: naming one that it has not, and the nearest that it has.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            listed = f" (it has {', '.join(sorted(known))})" if len(known) <= _MOST_LISTED else ""
            raise kind(f"{owner} has no setting {name!r}{hint}{listed}")


@cache
def _checks(settings: type) -> Mapping[str, Any]:
    from pydantic import ConfigDict, TypeAdapter

    hints = get_type_hints(settings, include_extras=True)
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    return {
        field.name: TypeAdapter(hints[field.name], config=strict) for field in dataclasses.fields(settings)
    }
