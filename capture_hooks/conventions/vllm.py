"""vLLM: the top-level ``eagle_aux_hidden_state_layer_ids``, boundaries themselves: id k is ``pre.k``.

Both of vLLM's runners prefer the top-level list and read it alike, as a sorted set.  They part where it
is missing: one then takes ``eagle_config``'s ids without SGLang's shift, the other its default layers.
So a head must carry the top-level list, whatever else it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ..errors import ConventionError
from ..spec import Point
from .boundaries import BoundaryConvention
from .contract import Captured, Convention, Order, Rank

_PIPELINE = (
    "Under pipeline parallelism some models number layers from their own rank's first. "
    "vLLM refuses a target that does not support EAGLE-3."
)


class Vllm(BoundaryConvention):
    """Id k is ``pre.k`` for k from 0 (the embedding) to n (the un-normed end)."""

    name: ClassVar[str] = "vllm"
    library = "vllm"
    versions = "0.33.0"
    families: ClassVar[tuple[str, ...]] = ()
    key = "eagle_aux_hidden_state_layer_ids"
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-29"
    source: ClassVar[str] = (
        "vllm/model_executor/models/interfaces.py:1640-1650,1751-1770; "
        "v1/worker/gpu_model_runner.py:5190-5224; v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:113-150"
    )
    limits: ClassVar[str] = (
        f"final_norm cannot be captured; with its transformers backend neither can the embedding. {_PIPELINE}"
    )
    outside: ClassVar[str] = "no layer reaches, so nothing would be captured for it, silently"

    def highest(self, n_layers: int) -> int:
        return n_layers

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return list(ids)

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        return list(boundaries)

    def point(self, boundary: int, n_layers: int) -> Point:
        # No layer is entered at boundary n.
        inside = 0 < boundary < n_layers
        return Point.pre(boundary) if inside else super().point(boundary, n_layers)


class VllmDeepseek(Vllm):
    """As `Vllm` without the embedding: these loops add a residual that is not there yet."""

    name = "vllm.deepseek"
    families = (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm5_next", "glm5_next_text", "glm_moe_dsa"),
        *("kimi_k2", "kimi_k25"),
    )
    source = "vllm/model_executor/models/deepseek_v2.py:1561-1586"
    limits = f"Neither the embedding nor final_norm can be captured. {_PIPELINE}"
    outside = "crashes (id 0 adds the embedding to a residual that is None) or lies beyond the last layer"

    def lowest(self, n_layers: int) -> int:
        return 1


class VllmManyStreams(Convention):
    """Models whose captured state is not a boundary of one residual stream."""

    name = "vllm.many_streams"
    library = "vllm"
    versions = "0.33.0"
    families = ("deepseek_v4", "deepseek_v41", "kimi_k3")
    key = Vllm.key
    source = "vllm/models: deepseek_v4 (mean over its streams), kimi_k3 (hidden + prefix_delta)"
    limits = (
        "Nothing is expressible: the model carries several streams, and what is captured is a mix of them."
    )

    rank: ClassVar[Rank] = "read"
    read_on: ClassVar[str] = "2026-11-29"
    order: ClassVar[Order] = "depth"

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Never possible."""
        self._refuse(list(ids))

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Never possible."""
        self._refuse(list(ids))

    def default(self, n_layers: int) -> Captured:
        """Never possible."""
        self._refuse([])

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Never possible."""
        self._refuse([str(point) for point in points])

    def _refuse(self, request: list[int] | list[str]) -> NoReturn:
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}): cannot take {request}: these models carry "
            "several residual streams and capture a mix of them, which is no point of one stream"
        )


#: In no particular order.
CONVENTIONS: tuple[Convention, ...] = (Vllm(), VllmDeepseek(), VllmManyStreams())
