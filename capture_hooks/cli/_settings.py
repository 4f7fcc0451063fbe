"""Options of a command made of a settings class: each field is one option, with its default and its help."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class After:
    """In a parameter's annotation: its option, and those that follow it, come after that setting's."""

    setting: str


def settings_as_options(
    settings: type, **kinds: type
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of a settings dataclass; it receives them as ``**settings``.

    The help of an option is the field's ``Field(description=...)``.  Bounds are not repeated: the dataclass
    checks them.  Fields that no single word can hold (mappings, tuples) become no options.

    Args:
        settings: a dataclass whose fields have defaults.
        **kinds: types that the command line shows for fields that are text in the dataclass.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        *own, _ = inspect.signature(command).parameters.values()
        blocks: dict[str | None, list[inspect.Parameter]] = {None: []}
        after = None
        for parameter in own:
            marks = [m for m in getattr(hints[parameter.name], "__metadata__", ()) if isinstance(m, After)]
            after = marks[0].setting if marks else after
            option = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            blocks.setdefault(after, []).append(option)
        parameters = blocks[None]
        for option in _options(settings, kinds):
            parameters += [option, *blocks.get(option.name, ())]
        made = functools.wraps(command)(lambda **given: command(**given))
        made.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        made.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return made

    return decorate


def _options(settings: type, kinds: dict[str, type]) -> Iterator[inspect.Parameter]:
    described, plain = get_type_hints(settings, include_extras=True), get_type_hints(settings)
    for field in dataclasses.fields(settings):
        name = field.name
        shown = plain[name] if name not in kinds else kinds[name] | None
        if not _is_a_word(shown):
            continue
        marks = getattr(described[name], "__metadata__", ())
        help_ = next((m.description for m in marks if isinstance(m, FieldInfo) and m.description), None)
        flag = ["--" + name.replace("_", "-")] if shown is bool else []
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[shown, typer.Option(*flag, help=help_)],
        )


def _is_a_word(kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return all(part is type(None) or _is_a_word(part) for part in get_args(kind))
    return get_origin(kind) is Literal or kind in (str, int, float, bool, Path)
