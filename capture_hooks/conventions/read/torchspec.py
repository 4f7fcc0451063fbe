"""TorchSpec (lightseekorg): ``aux_hidden_states_layers`` of a training run, outputs of layers.

Its two own backends part at the edges.  With transformers it hooks the layers and concatenates in the order
of the list.  With vLLM it adds one to each id, asks vLLM for the un-normed end as well, and takes the last
column for that end; so the last layer's output never reaches the head.  With SGLang the list goes to
SGLang's own setter, with SGLang's rule for the family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ...spec import Point
from ..contract import Captured, Convention, Order
from .table import TableConvention, outputs

_SETTING = "inference.aux_hidden_states_layers"


class TorchSpec(TableConvention):
    """With transformers: id k is ``post.k``, in the order of the list."""

    name: ClassVar[str] = "torchspec"
    library = "torchspec"
    versions = "2026.4.28"
    key: ClassVar[str] = _SETTING
    source: ClassVar[str] = (
        "lightseekorg/TorchSpec 6f21829: torchspec/models/target/eagle3_target_model.py:92-114,218-256"
    )
    limits: ClassVar[str] = (
        "Neither the embedding nor final_norm can be captured. Its export to vLLM adds one to the ids of "
        "heads whose model_type is kimi_k2, and of no others (tools/convert_to_hf.py:145)."
    )
    outside: ClassVar[str] = "is no layer: 'Layer index out of bounds'"
    twice: ClassVar = "fails"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)

    def default(self, n_layers: int) -> Captured:
        """The outputs of layers 1, n//2-1 and n-4; below seven layers it fails."""
        return self.taken([1, n_layers // 2 - 1, n_layers - 4], n_layers)


class TorchSpecVllm(TorchSpec):
    """With vLLM: id k is ``post.k``, by depth, and not the last layer."""

    name = "torchspec.vllm"
    key = f"{_SETTING}, vLLM engine"
    primary = False
    source = (
        "lightseekorg/TorchSpec 6f21829: torchspec/inference/engine/vllm_engine.py:150-183, "
        "mooncake_hidden_states_connector.py:160-167,333"
    )
    limits = (
        "The output of the last layer is taken for the last hidden state and does not reach the head; nor "
        "can final_norm be captured. What a list with one id twice does was not established."
    )
    order: ClassVar[Order] = "depth"
    outside = "is not captured by vLLM as a layer's output"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output but the last."""
        return {k: Point.post(k) for k in range(n_layers - 1)}

    def stray(self, number: int, n_layers: int) -> Point | None:
        """-1 becomes vLLM's 0."""
        return Point("embed") if number == -1 else None

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """As a table, without the ids that it filters out and the one that it takes for the end."""
        numbers = self._numbers(ids, n_layers)
        left_out = [number for number in numbers if number >= n_layers - 1]
        quirks = tuple(
            f"id {number} is the last layer, whose output is taken for the last hidden state: left out"
            if number == n_layers - 1
            else f"id {number} is beyond the last layer: left out"
            for number in dict.fromkeys(left_out)
        )
        if numbers.count(n_layers - 1) > 1:
            self._refuse(ids, n_layers, f"{n_layers - 1} stands there twice")
        rest = [number for number in numbers if number < n_layers - 1]
        if not rest:
            self._refuse(ids, n_layers, "nothing is left for the head")
        found = super().captured(rest, n_layers)
        return Captured(found.points, (*quirks, *found.quirks))


CONVENTIONS: tuple[Convention, ...] = (TorchSpec(), TorchSpecVllm())
