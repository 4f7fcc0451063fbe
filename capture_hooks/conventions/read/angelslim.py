"""AngelSlim (Tencent): ``aux_hidden_states_layer_ids`` (with an s) of the draft's config, outputs of layers.

Its transformers backend indexes ``hidden_states`` by id + 1, whose last entry is the final norm; its vLLM
backend indexes a list of the layers' outputs.  Neither checks a number, so Python's indexing from the end
applies to negative ones.  For DFlash a script copies ``dflash_config.target_layer_ids`` into the same place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ...spec import Point
from ..contract import Captured, Convention
from .table import TableConvention, hidden_states_entry, output_list_entry, outputs

_FILE = "angelslim/compressor/speculative/train/models/target/target_model_wrapper.py"
_OTHERS = (
    "No server reads this key: other libraries take their default layers unless the ids stand in theirs."
)


class AngelSlim(TableConvention):
    """With transformers: id k is ``post.k``, and n-1 is ``final_norm``."""

    name: ClassVar[str] = "angelslim"
    library = "angelslim"
    versions = "2026.8.7"
    key: ClassVar[str] = "aux_hidden_states_layer_ids"
    source: ClassVar[str] = f"Tencent/AngelSlim 67394ce: {_FILE}:578-629"
    limits: ClassVar[str] = f"Neither the embedding nor the un-normed end can be captured. {_OTHERS}"
    outside: ClassVar[str] = "is beyond the last layer or counted from the end"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output, but the final norm for the last."""
        return outputs(n_layers, last=Point("final_norm"))

    def stray(self, number: int, n_layers: int) -> Point | None:
        """An entry of ``hidden_states``."""
        return hidden_states_entry(number, n_layers)

    def default(self, n_layers: int) -> Captured:
        """The outputs of layers 1, n//2-1 and n-4; in a shallow model, whatever those numbers fetch."""
        return self.taken([1, n_layers // 2 - 1, n_layers - 4], n_layers)


class AngelSlimVllm(AngelSlim):
    """With vLLM: id k is ``post.k``, the last one un-normed."""

    name = "angelslim.vllm"
    key = "aux_hidden_states_layer_ids, vLLM backend"
    primary = False
    source = f"Tencent/AngelSlim 67394ce: {_FILE}:353-377,1393-1399,1711-1717"
    limits = f"Neither the embedding nor final_norm can be captured. {_OTHERS}"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)

    def stray(self, number: int, n_layers: int) -> Point | None:
        """An entry of the list of outputs."""
        return output_list_entry(number, n_layers)


CONVENTIONS: tuple[Convention, ...] = (AngelSlim(), AngelSlimVllm())
