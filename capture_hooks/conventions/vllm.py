"""vLLM: the top-level ``eagle_aux_hidden_state_layer_ids``, boundaries themselves: id k is ``pre.k``.

A target's loop asks at every boundary whether it is among the ids (``EagleModelMixin``), so the states come
out by depth, an id written twice counts once, and one that no layer reaches is left out without a word.  Some
targets' loops differ; those have conventions of their own, by family.  Which list a runner finds in a head's
config is `vllm_runners`'; ids under DFlash's and DSpark's keys are `vllm_dflash`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ..errors import ConventionError
from ..spec import Point
from .boundaries import BoundaryConvention
from .contract import Captured, Convention, Order, Rank
from .vllm_families import TRANSFORMERS_BACKEND, WITHOUT_EAGLE3

_PIPELINE = "Under pipeline parallelism some models number layers from their own rank's first."


class Vllm(BoundaryConvention):
    """Id k is ``pre.k`` for k from 0 (the embedding) to n (the un-normed end)."""

    name: ClassVar[str] = "vllm"
    library = "vllm"
    versions: ClassVar[str] = "0.18.0 to 0.33.0"
    families: ClassVar[tuple[str, ...]] = ()
    key: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-29"
    source: ClassVar[str] = (
        "vllm/model_executor/models/interfaces.py:1640-1650,1751-1770 and llama.py:429-441 of 0.33.0; "
        "run: 0.32.0"
    )
    limits: ClassVar[str] = f"final_norm cannot be captured. {_PIPELINE}"
    outside: ClassVar[str] = "no layer reaches, so nothing would be captured for it, silently"
    #: What the reader adds to an id under this key.
    shift: ClassVar[int] = 0

    def highest(self, n_layers: int) -> int:
        return n_layers

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return [number + self.shift for number in ids]

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        found = [boundary - self.shift for boundary in boundaries]
        if min(found) < 0:
            points = [self.point(boundary, n_layers) for boundary in boundaries]
            self._refuse(points, n_layers, f"embed would be id {min(found)}, and no id is negative")
        return found

    def point(self, boundary: int, n_layers: int) -> Point:
        # No layer is entered at boundary n.
        inside = 0 < boundary < n_layers
        return Point.pre(boundary) if inside else super().point(boundary, n_layers)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As for any boundaries; but the runner cannot unpack a forward without a single state."""
        found = super().captured(ids, n_layers)
        if not found.points:
            self._refuse(
                ids, n_layers, "none is a boundary; nothing is captured, and it stops at the first forward"
            )
        return found

    def default(self, n_layers: int) -> Captured:
        """Boundaries 2, n//2 and n-3, taken like any other list of them (below 7 layers some coincide).

        ``get_eagle3_default_aux_hidden_state_layers``, interfaces.py:1751-1770.
        """
        layers = [2, n_layers // 2, n_layers - 3]
        found = self.captured([layer - self.shift for layer in layers], n_layers)
        return Captured(
            found.points, (f"no ids are given: it takes its default, boundaries {layers}", *found.quirks)
        )


class VllmBeforeMixin(Vllm):
    """Until 0.17 each loop looked before its layers only: ``pre.k`` for k from 1 to n-1."""

    name = "vllm.before-0.18"
    versions = "0.11.2 to 0.17.1"
    rank: ClassVar[Rank] = "read"
    read_on = "2026-11-30"
    source = "vllm/model_executor/models/llama.py:420-438 of 0.16.0, the same in 0.11.2 and 0.17.1"
    limits = f"Neither the embedding nor the un-normed end can be captured. {_PIPELINE}"
    outside = "crashes (id 0 adds the embedding to a residual that is None) or is never reached, silently"

    def lowest(self, n_layers: int) -> int:
        return 1

    def highest(self, n_layers: int) -> int:
        return n_layers - 1

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        return super().captured(_without_embedding(self, ids, n_layers), n_layers)


class VllmDeepseekUntil24(VllmBeforeMixin):
    """As llama's loop before 0.18, for longer."""

    name = "vllm.deepseek-0.24"
    versions = "0.18.0 to 0.24.0"
    families = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "kimi_k25")
    source = "vllm/model_executor/models/deepseek_v2.py of 0.18.0, 0.20.2 and 0.24.0"


class VllmDeepseek(Vllm):
    """As `Vllm` without the embedding: this loop adds a residual that is not there yet."""

    name = "vllm.deepseek"
    versions = "0.25.1 to 0.33.0"
    families = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
    source = "vllm/model_executor/models/deepseek_v2.py:1561-1587 of 0.33.0; run: 0.32.0"
    limits = f"Neither the embedding nor final_norm can be captured. {_PIPELINE}"
    outside = "crashes (id 0 adds the embedding to a residual that is None) or lies beyond the last layer"

    def lowest(self, n_layers: int) -> int:
        return 1

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        return super().captured(_without_embedding(self, ids, n_layers), n_layers)


class VllmDeepseekV32(Vllm):
    """As `Vllm` without the un-normed end: this loop does not look again after its last layer."""

    name = "vllm.deepseek_v32"
    versions = "0.26.0 to 0.33.0"
    families = ("deepseek_v32", "glm_moe_dsa")
    rank: ClassVar[Rank] = "read"
    read_on = "2026-11-30"
    source = "vllm/models/deepseek_v32/nvidia/model.py:285-325 of 0.33.0"
    limits = f"Neither the un-normed end nor final_norm can be captured. {_PIPELINE}"

    def highest(self, n_layers: int) -> int:
        return n_layers - 1


class VllmTransformers(Vllm):
    """Models that vLLM runs through its transformers backend: the output of layer k-1, in the ids' order."""

    name = "vllm.transformers"
    versions = "0.32.0 to 0.33.0"
    families = TRANSFORMERS_BACKEND
    source = "vllm/model_executor/models/transformers/base.py:845-870 of 0.33.0; run: 0.32.0"
    limits = (
        "Neither the embedding nor final_norm can be captured. "
        "A native model that is forced into this backend (model_impl=transformers) follows it as well."
    )
    order: ClassVar[Order] = "listed"
    outside = "is no layer's output: it stops while starting, with a KeyError"

    def lowest(self, n_layers: int) -> int:
        return 1

    def point(self, boundary: int, n_layers: int) -> Point:
        return Point.post(boundary - 1)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """In the order of the ids, each once; anything else fails."""
        found = self.boundaries(self._integers(ids, n_layers), n_layers)
        for number, boundary in zip(ids, found, strict=True):
            if not 1 <= boundary <= n_layers:
                self._refuse(ids, n_layers, f"id {number} is boundary {boundary}, which {self.outside}")
        once = list(dict.fromkeys(found))
        quirks = ("an id that stands there twice is captured once",) if len(once) < len(found) else ()
        return Captured(tuple(self.point(boundary, n_layers) for boundary in once), quirks)


class VllmNothing(Convention):
    """Targets whose states vLLM does not hand out, or not as a boundary of one residual stream."""

    library = "vllm"
    key: ClassVar[str] = Vllm.key
    order: ClassVar[Order] = "depth"
    families: ClassVar[tuple[str, ...]]
    read_on: ClassVar[str] = "2026-11-30"
    #: What stands in the way, after "these targets".
    why: ClassVar[str]

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Never possible."""
        self._refuse(ids)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Never possible."""
        self._refuse(ids)

    def default(self, n_layers: int) -> Captured:
        """Never possible."""
        self._refuse([])

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Never possible."""
        self._refuse(points)

    def _refuse(self, request: Sequence[object]) -> NoReturn:
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}): cannot take [{', '.join(map(str, request))}]: "
            f"these targets {self.why}"
        )


class VllmManyStreams(VllmNothing):
    """Models whose captured state is not a boundary of one residual stream."""

    name: ClassVar[str] = "vllm.many_streams"
    versions = "0.32.0 to 0.33.0"
    families = ("deepseek_v4", "deepseek_v41", "glm5_next", "glm5_next_text", "kimi_k3")
    source = (
        "vllm/models/deepseek_v4/nvidia/model.py:1006, deepseek_v41/nvidia/model.py:1203, "
        "glm5next/common/model.py:845 (means of streams), kimi_k3/nvidia/model.py:1178 (a sum of two)"
    )
    limits = (
        "Nothing is expressible: the model carries several streams, and what is captured is a mix of them."
    )
    rank: ClassVar[Rank] = "read"
    why = "carry several residual streams and capture a mix of them, which is no point of one stream"


class VllmWithout(VllmNothing):
    """Targets that vLLM runs without the interface: it refuses the head while starting."""

    name: ClassVar[str] = "vllm.none"
    versions: ClassVar[str] = "0.32.0 to 0.33.0"
    families = WITHOUT_EAGLE3
    source = "vllm/v1/worker/gpu_model_runner.py:5234-5238 of 0.32.0; model_executor/models/registry.py"
    limits = "Nothing is expressible: vLLM has no EAGLE-3 capture for these model types."
    rank: ClassVar[Rank] = "verified"
    why = "have no EAGLE-3 interface; vLLM stops with 'Model does not support EAGLE3 interface'"


class VllmWithoutUntil32(VllmWithout):
    """Granite's mixtures, which 0.33 gave the interface."""

    name = "vllm.none-0.32"
    versions = "0.32.0"
    families = ("granitemoe", "granitemoe_swa", "granitemoeshared")


def _without_embedding(convention: Vllm, ids: Sequence[int], n_layers: int) -> Sequence[int]:
    """The ids, for a loop that fails at boundary 0."""
    if 0 in convention.boundaries(convention._integers(ids, n_layers), n_layers):
        convention._refuse(ids, n_layers, "boundary 0 adds the embedding to a residual that is None: a crash")
    return ids


#: In no particular order.
CONVENTIONS: tuple[Convention, ...] = (
    Vllm(),
    VllmBeforeMixin(),
    VllmDeepseekUntil24(),
    VllmDeepseek(),
    VllmDeepseekV32(),
    VllmTransformers(),
    VllmManyStreams(),
    VllmWithout(),
    VllmWithoutUntil32(),
)
