"""The capture spec: the ordered points a head takes as input, and the point whose logits it learns.

>>> spec = CaptureSpec.parse("post.2, post.15, post.26")
>>> str(spec)
'post.2, post.15, post.26'
>>> CaptureSpec.parse("embed, post.-4 -> post.-1").target
Point(kind='post', layer=-1, module=None)
>>> CaptureSpec.eagle3(30)
CaptureSpec.parse('post.1, post.14, post.26')
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import SpecError
from .points import ALLOWED_FORMS, Point, Site

#: Version of the JSON form; a reader refuses versions it does not know.
FORMAT = 1
_FINAL_NORM = Point("final_norm")
#: A point as JSON Schema can say it: what `Point.parse` reads, without surrounding blanks.
_TEXT = r"^(embed|final_norm|(pre|post)\.-?[0-9]{1,9}|(in|out):[A-Za-z_0-9][A-Za-z_0-9.\-]*)$"


class _Document(BaseModel):
    """The JSON form, and the source of its published schema."""

    model_config = ConfigDict(extra="forbid", title="CaptureSpec")

    format: int = Field(FORMAT, description="version of this form", ge=FORMAT, le=FORMAT)
    inputs: list[str] = Field(
        min_length=1,
        description=f"capture points in the order the head concatenates them; each one of: {ALLOWED_FORMS}",
        json_schema_extra={"items": {"type": "string", "pattern": _TEXT}},
    )
    target: str = Field(
        "final_norm",
        description="point whose logits the head learns",
        json_schema_extra={"pattern": _TEXT},
    )


@dataclass(frozen=True, slots=True, repr=False)
class CaptureSpec:
    """An ordered, hashable list of points; order is part of the meaning."""

    inputs: tuple[Point, ...]
    target: Point = _FINAL_NORM

    def __post_init__(self) -> None:
        if not self.inputs:
            raise SpecError("a capture spec needs at least one input point, such as 'post.2'")
        seen: set[Point] = set()
        for point in self.inputs:
            if point in seen:
                raise SpecError(f"{point} appears twice in {_join(self.inputs)!r}; name each point once")
            seen.add(point)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``POINT, POINT, ... [-> TARGET]``.

        Raises:
            SpecError: quoting the whole text, the position of the offending part and the allowed forms.
        """
        inputs_text, arrow, target_text = text.partition("->")
        points, at = [], 0
        for part in inputs_text.split(","):
            points.append(_parse_part(part, text, at))
            at += len(part) + 1
        target = _parse_part(target_text, text, len(inputs_text) + 2) if arrow else _FINAL_NORM
        return cls(tuple(points), target)

    @classmethod
    def eagle3(cls, n_layers: int) -> Self:
        """The field's default layers for EAGLE-3: outputs of layers 1, n//2-1 and n-4.

        The same tensors as the inputs of layers 2, n//2 and n-3 in SafeAILab/EAGLE, vLLM 0.33,
        SGLang 0.5.23, SpecForge 0.2.0 and ModelOpt 0.47 when ids are omitted.

        Raises:
            SpecError: for fewer than 7 layers, where those three layers are not distinct.
        """
        if n_layers < 7:
            raise SpecError(
                f"the EAGLE-3 default layers (1, n//2-1, n-4) need at least 7 layers, not {n_layers}; "
                "write the points out, for example CaptureSpec.parse('embed, post.0, post.1')"
            )
        return cls(tuple(Point.post(k) for k in (1, n_layers // 2 - 1, n_layers - 4)))

    @classmethod
    def from_json(cls, document: str | Mapping[str, Any]) -> Self:
        """Read the JSON form (text or an already decoded object).

        Raises:
            SpecError: naming the field that is wrong.
        """
        try:
            if isinstance(document, str):
                read = _Document.model_validate_json(document)
            else:
                plain = dict(document) if isinstance(document, Mapping) else document
                read = _Document.model_validate(plain)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise SpecError(
                f"capture spec JSON: {where}: {first['msg']} (got {reprlib.repr(first['input'])})"
            ) from None
        inputs = (_read_point(f"inputs.{index}", text) for index, text in enumerate(read.inputs))
        return cls(tuple(inputs), _read_point("target", read.target))

    def to_json(self) -> dict[str, Any]:
        """The JSON form as a plain object; `from_json` reads it back."""
        return {"format": FORMAT, "inputs": [str(p) for p in self.inputs], "target": str(self.target)}

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """The JSON Schema (draft 2020-12) of `to_json`'s form."""
        return _Document.model_json_schema()

    def digest(self) -> str:
        """SHA-256 over the canonical JSON form: stable across processes, unlike ``hash()``."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def resolve(self, n_layers: int, split: Collection[int] = ()) -> ResolvedSpec:
        """The comparable form on boundaries for a model of ``n_layers`` (see `Point.resolve`).

        Raises:
            SpecError: for a layer out of range, or two inputs that name the same state.
        """
        sites: dict[Site, Point] = {}
        for point in self.inputs:
            site = point.resolve(n_layers, split)
            if site in sites:
                raise SpecError(
                    f"{sites[site]} and {point} are the same state in a model of {n_layers} layers; keep one"
                )
            sites[site] = point
        return ResolvedSpec(n_layers, tuple(sites), self.target.resolve(n_layers, split))

    def absolute(self, n_layers: int) -> Self:
        """The same spec with every layer index non-negative."""
        return type(self)(tuple(p.absolute(n_layers) for p in self.inputs), self.target.absolute(n_layers))

    def __str__(self) -> str:
        inputs = _join(self.inputs)
        return inputs if self.target == _FINAL_NORM else f"{inputs} -> {self.target}"

    def __repr__(self) -> str:
        return f"CaptureSpec.parse({str(self)!r})"

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """A spec on boundaries: equal for two specs that name the same tensors in the same order."""

    n_layers: int
    inputs: tuple[Site, ...]
    target: Site


def _join(points: tuple[Point, ...]) -> str:
    return ", ".join(str(point) for point in points)


def _read_point(field: str, text: str) -> Point:
    if not re.fullmatch(_TEXT, text) or text.endswith("\n"):  # Python's $ also matches before a last newline
        raise SpecError(
            f"capture spec JSON: {field}: {text!r} is not a capture point; allowed forms: {ALLOWED_FORMS}"
        )
    return Point.parse(text)


def _parse_part(part: str, text: str, at: int) -> Point:
    column = at + len(part) - len(part.lstrip())
    try:
        return Point.parse(part)
    except SpecError:
        what = f"{part.strip()!r}" if part.strip() else "an empty point"
        raise SpecError(
            f"{what} at position {column} of {text!r} is not a capture point; allowed forms: {ALLOWED_FORMS}"
        ) from None
