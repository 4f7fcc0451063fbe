"""SafeAILab/EAGLE: no ids; the inputs of layers 2, n//2 and n-3 are written into the model's loop.

Each layer asks ``idx==len(self.layers)-3 or idx==len(self.layers)//2 or idx==2`` before it runs, so in a
model of fewer than 7 layers fewer than three states come out, and the head's ``fc`` does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ...spec import Point
from ..contract import Captured, Convention, Order, Rank, Reader, Reading
from .table import TableConvention


class Eagle(TableConvention):
    """Whatever a config says, ``pre.2``, ``pre.(n//2)`` and ``pre.(n-3)``."""

    name = "eagle"
    library: ClassVar[str] = "eagle"
    versions: ClassVar[str] = "2026.2.19"
    key = "none: written into the model's loop"
    source: ClassVar[str] = (
        "SafeAILab/EAGLE cb7e084: eagle/model/modeling_llama_kv.py:1138, modeling_qwen3_kv.py:582, "
        "traineagle3/modeling_llama_kv.py:1139; concatenated at model/utils.py:252"
    )
    limits = "It takes no ids: a head for other layers cannot be trained or run with it."
    order: ClassVar[Order] = "depth"
    outside = "is not looked at"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """None: it has no list."""
        return {}

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Never possible."""
        self._refuse(ids, n_layers, self.limits)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Its own layers; the ids are not looked at."""
        found = self.default(n_layers)
        return Captured(found.points, (f"the ids {list(ids)} are not looked at", *found.quirks))

    def default(self, n_layers: int) -> Captured:
        """Its own layers, as far as the model has them."""
        inside = sorted({k for k in (2, n_layers // 2, n_layers - 3) if 0 <= k < n_layers})
        points = tuple(Point.pre(k) if k else Point("embed") for k in inside)
        few = f"in a model of {n_layers} layers only {len(points)} of its three states are there"
        return Captured(points, () if len(points) == 3 else (few,))


class EagleReader(Reader):
    """It reads no ids from a head's config."""

    name = "eagle"
    library = Eagle.library
    versions = Eagle.versions
    source = Eagle.source
    rank: ClassVar[Rank] = "read"
    read_on = Eagle.read_on

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """Its own layers, whatever stands in the config."""
        return Reading(CONVENTIONS[0].name, None, None, CONVENTIONS[0].default(n_layers))


CONVENTIONS: tuple[Convention, ...] = (Eagle(),)
READERS: tuple[Reader, ...] = (EagleReader(),)
