"""NeMo Automodel: three lists, one for each kind of head, all outputs of layers.

For EAGLE-3 the transformers backend hooks the layers, and so the last one is un-normed; the vLLM backend
adds one and refuses the last layer; the SGLang backend hands the list to SGLang's own setter.  For DFlash
training hooks the layers too, but the draft's own generation indexes ``hidden_states``, where the last layer
is the final norm.  For DSpark both sides agree on the final norm, and -1 is the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ...spec import Point
from ..contract import Captured, Convention, Order
from .table import SPREAD, TableConvention, outputs

_ROOM = "NVIDIA-NeMo/Automodel 36044ad: nemo_automodel/components/speculative"


class Nemo(TableConvention):
    """EAGLE-3: id k is ``post.k``; exactly three, in the order of the list."""

    name: ClassVar[str] = "nemo_automodel"
    library = "nemo_automodel"
    versions = "2026.8.22"
    key: ClassVar[str] = "aux_layer_ids"
    source: ClassVar[str] = (
        f"{_ROOM}/eagle/target.py:42-84,346-361; eagle/vllm_runner.py:245-253; eagle/sglang_runner.py:269"
    )
    limits: ClassVar[str] = (
        "Neither the embedding nor final_norm can be captured. The list stands in the recipe and not in the "
        "draft's config, so a server takes its own default layers."
    )
    count: ClassVar[int | None] = 3
    outside: ClassVar[str] = "is out of bounds"
    twice: ClassVar = "fails"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)

    def default(self, n_layers: int) -> Captured:
        """The outputs of layers 1, n//2-1 and n-4; refused below seven layers."""
        return self.taken([1, n_layers // 2 - 1, n_layers - 4], n_layers)


class NemoDflash(Nemo):
    """DFlash, as it is trained: id k is ``post.k``, in the order of the list."""

    name = "nemo_automodel.dflash"
    key = "dflash_config.target_layer_ids"
    primary = False
    source = f"{_ROOM}/dflash/target.py:117-125,240; dflash/draft_qwen3.py:282-299,456"
    limits = (
        "Neither the embedding nor final_norm can be captured. Its own spec_generate takes final_norm for "
        "the last layer, which training did not."
    )
    count = None

    def default(self, n_layers: int) -> Captured:
        """It depends on the draft: as many layers as the draft has, evenly from 1 to n-3."""
        self._refuse((), n_layers, SPREAD)


class NemoDspark(NemoDflash):
    """DSpark: id k is ``post.k``, n-1 is ``final_norm``, -1 is ``embed``; strictly increasing."""

    name = "nemo_automodel.dspark"
    key = "target_layer_ids"
    source = f"{_ROOM}/dspark/common.py:64-107; dspark/target.py:189-286; dspark/registry.py:86-104"
    limits = "The un-normed end cannot be captured."
    order: ClassVar[Order] = "depth"
    outside = "is out of range"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """The embedding, every layer's output, and the final norm for the last."""
        return {-1: Point("embed"), **outputs(n_layers, last=Point("final_norm"))}

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """A list that does not increase is an AssertionError: nothing happens silently."""
        return Captured(self.to_points(ids, n_layers))


CONVENTIONS: tuple[Convention, ...] = (Nemo(), NemoDflash(), NemoDspark())
