"""One point on a decoder's residual stream, as text and as a comparable site.

A decoder of ``n`` layers carries a residual stream.  *Boundary* ``k`` is the stream entering layer
``k``; boundary ``n`` is its un-normed end.

==============  ==========  =====================================================================
text            boundary    meaning
==============  ==========  =====================================================================
``embed``       0           the stream as layer 0 receives it (scaled, with position embeddings)
``pre.k``       k           the stream entering layer k
``post.k``      k + 1       the stream leaving layer k, after the MLP's add
``final_norm``  –           norm(boundary n): what ``lm_head`` is fed
``in:NAME``     –           first input of the submodule with that qualified name
``out:NAME``    –           output of that submodule
==============  ==========  =====================================================================

``k`` may be negative (``post.-1`` is the last layer) until the layer count is known.

>>> Point.parse("post.-1").resolve(12)
Site(boundary=12, side=None, norm=False, module=None)
>>> Point.parse("post.3").resolve(12) == Point.parse("pre.4").resolve(12)
True
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Self

from ..errors import SpecError

Kind = Literal["embed", "pre", "post", "final_norm", "in", "out"]

ALLOWED_FORMS = "embed, pre.K, post.K, final_norm, in:MODULE, out:MODULE (K an integer, may be negative)"

#: No model is deeper; int() of unbounded text would be another error, and a slow one.
_DIGITS = 9
_LAYER = re.compile(rf"(pre|post)\.(-?\d{{1,{_DIGITS}}})", re.ASCII)
_MODULE = re.compile(r"(in|out):([A-Za-z_0-9][A-Za-z_0-9.\-]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a point lies once the layer count is known: two points are the same iff sites are equal.

    ``side`` is set only at a boundary where the model adds something between two layers, so that
    ``post.k`` and ``pre.(k+1)`` are different tensors there.
    """

    boundary: int | None = None
    side: Literal["pre", "post"] | None = None
    norm: bool = False
    module: tuple[Literal["in", "out"], str] | None = None

    @property
    def residual(self) -> bool:
        """Whether the state is one of the stream's width (a boundary or the final norm)."""
        return self.module is None


@dataclass(frozen=True, slots=True)
class Point:
    """One named state of a decoder; see the module's table.  Build with `parse` or the helpers."""

    kind: Kind
    layer: int | None = None
    module: str | None = None

    def __post_init__(self) -> None:
        wants_layer, wants_module = self.kind in ("pre", "post"), self.kind in ("in", "out")
        if wants_layer != (self.layer is not None) or wants_module != (self.module is not None):
            raise SpecError(
                f"point {self.kind!r} with layer={self.layer!r}, module={self.module!r} is incomplete; "
                f"allowed forms: {ALLOWED_FORMS}"
            )
        if self.layer is not None and (type(self.layer) is not int or abs(self.layer) >= 10**_DIGITS):
            raise SpecError(
                f"layer {self.layer!r} of a {self.kind!r} point is not an integer of a possible size"
            )
        if self.module is not None and not _MODULE.fullmatch(f"in:{self.module}"):
            raise SpecError(f"module name {self.module!r} is not a qualified name such as model.layers.3.mlp")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one point.

        Raises:
            SpecError: quoting the text and the allowed forms.
        """
        word = text.strip()
        if word in ("embed", "final_norm"):
            return cls("embed" if word == "embed" else "final_norm")
        if match := _LAYER.fullmatch(word):
            return cls("pre" if match[1] == "pre" else "post", layer=int(match[2]))
        if match := _MODULE.fullmatch(word):
            return cls("in" if match[1] == "in" else "out", module=match[2])
        raise SpecError(f"{text!r} is not a capture point; allowed forms: {ALLOWED_FORMS}")

    @classmethod
    def pre(cls, layer: int) -> Self:
        """The residual stream entering ``layer``."""
        return cls("pre", layer=layer)

    @classmethod
    def post(cls, layer: int) -> Self:
        """The residual stream leaving ``layer``."""
        return cls("post", layer=layer)

    def __str__(self) -> str:
        if self.layer is not None:
            return f"{self.kind}.{self.layer}"
        return f"{self.kind}:{self.module}" if self.module is not None else self.kind

    def absolute(self, n_layers: int) -> Self:
        """The same point with a non-negative layer.

        Raises:
            SpecError: when the layer lies outside ``-n_layers .. n_layers-1``.
        """
        if self.layer is None:
            return self
        layer = self.layer + n_layers if self.layer < 0 else self.layer
        if not 0 <= layer < n_layers:
            raise SpecError(
                f"{self} is outside a model of {n_layers} layers: "
                f"K goes from {self.kind}.0 to {self.kind}.{n_layers - 1} "
                f"(or {self.kind}.-{n_layers} to {self.kind}.-1)"
            )
        return type(self)(self.kind, layer=layer)

    def resolve(self, n_layers: int, split: Collection[int] = ()) -> Site:
        """The comparable form for a model of ``n_layers``.

        Args:
            n_layers: decoder layers of the model.
            split: boundaries ``k`` at which the model adds something between layers, so that
                ``post.(k-1)`` and ``pre.k`` differ (Qwen3-VL's DeepStack).

        Raises:
            SpecError: when the layer is out of range.
        """
        if self.kind == "final_norm":
            return Site(norm=True)
        if self.kind == "in" or self.kind == "out":
            assert self.module is not None
            return Site(module=(self.kind, self.module))
        layer = self.absolute(n_layers).layer
        boundary = 0 if layer is None else layer + (self.kind == "post")
        if boundary not in split:
            return Site(boundary=boundary)
        return Site(boundary=boundary, side="post" if self.kind == "post" else "pre")
