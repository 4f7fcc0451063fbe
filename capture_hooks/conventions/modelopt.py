"""NVIDIA ModelOpt: outputs of layers in training and in two dumps, inputs of layers in what it asks of vLLM.

One ``--aux-layers`` list is one layer off between the dump script for vLLM and the others, and so is a head
that was trained on hooks and is served by vLLM's V1 runner with the ids of its own export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from ..spec import Point
from .contract import Captured, Convention, Order, Rank
from .dump_lists import ListWithLast
from .read.table import TableConvention, outputs

_SCRIPTS = "NVIDIA/Model-Optimizer a2fbac7: examples/speculative_decoding/collect_hidden_states"


class Modelopt(TableConvention):
    """Hooks: id k is ``post.k``, in the order of the forward."""

    name: ClassVar[str] = "modelopt"
    library = "modelopt"
    versions: ClassVar[str] = "0.37.0 to 0.47.0"
    key: ClassVar[str] = "eagle_config.eagle_aux_hidden_state_layer_ids"
    rank: ClassVar[Rank] = "verified"
    source: ClassVar[str] = (
        "modelopt/torch/speculative/plugins/hf_eagle.py:58-63,380-406 of 0.47.0 (run; so since 0.37.0); "
        "exported unchanged by export/plugins/hf_spec_configs.py:47,140"
    )
    limits: ClassVar[str] = "Neither the embedding nor final_norm can be captured."
    order: ClassVar[Order] = "depth"
    outside: ClassVar[str] = "is no layer: nothing is captured for it, and training fails on the width of fc"
    twice: ClassVar[Literal["kept", "once", "fails"]] = "fails"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)

    def default(self, n_layers: int) -> Captured:
        """The set of 1, n//2-1 and n-4, which are EAGLE's layers; fewer in a shallow model."""
        return self.taken(default_ids(n_layers), n_layers)


class ModeloptHfDump(Modelopt):
    """The dump through transformers: ``hidden_states[k + 1]``, so that n-1 is ``final_norm``."""

    name = "modelopt.hf_dump"
    key = "compute_hidden_states_hf.py --aux-layers"
    versions = "0.47.0"
    primary = False
    rank: ClassVar[Rank] = "read"
    source = f"{_SCRIPTS}/compute_hidden_states_hf.py:153,184-189 and common.py:53-80"
    limits = "Neither the embedding nor the un-normed end can be captured."
    outside = "is out of range, and refused"
    twice = "once"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output, but the final norm for the last."""
        return outputs(n_layers, last=Point("final_norm"))


class ModeloptTrtDump(ModeloptHfDump):
    """The dump through TensorRT-LLM, which captures after each layer."""

    name = "modelopt.trt_dump"
    key = "compute_hidden_states_trtllm.py --aux-layers"
    source = f"{_SCRIPTS}/compute_hidden_states_trtllm.py:201 and common.py:53-80"
    limits = "Neither the embedding nor final_norm can be captured."

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return outputs(n_layers)


class ModeloptVllmDump(ModeloptHfDump):
    """The dump through vLLM, to which the ids are passed as they are: id k is ``pre.k``."""

    name = "modelopt.vllm_dump"
    key = "compute_hidden_states_vllm.py --aux-layers"
    source = f"{_SCRIPTS}/compute_hidden_states_vllm.py:50-90,174-179,262,294-301"
    limits = (
        "Neither the un-normed end, which it appends as the last state, nor final_norm can be captured. "
        "The exported config names outputs of layers by the same numbers."
    )

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's input."""
        return {k: Point.pre(k) if k else Point("embed") for k in range(n_layers)}

    def default(self, n_layers: int) -> Captured:
        """None: the preset "eagle", which is the option's default, is not known to this script."""
        self._refuse((), n_layers, "its default, 'eagle', stops it with a ValueError; ids must be given")


class ModeloptStreaming(ListWithLast):
    """Training while vLLM runs: what vLLM is told, ending with n."""

    name = "modelopt.streaming"
    library = "modelopt"
    versions = "0.47.0"
    key = "EAGLE_CAPTURE_IDS"
    primary = False
    source = (
        "NVIDIA/Model-Optimizer a2fbac7: "
        "tools/launcher/common/eagle3/train_eagle_streaming.sh:39-40,107-108,182 and "
        "modelopt/torch/speculative/plugins/hf_streaming_dataset.py:402"
    )
    limits = "final_norm cannot be captured. The last one is no input: it is the base model's last state."
    outside = "is no boundary: vLLM captures nothing for it, and training fails on the width"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's input, and the un-normed end."""
        inputs = {k: Point.pre(k) if k else Point("embed") for k in range(n_layers)}
        return {**inputs, n_layers: Point.post(n_layers - 1)}

    def last(self, n_layers: int) -> int:
        """The un-normed end."""
        return n_layers

    def default(self, n_layers: int) -> Captured:
        """None: the launcher stops without the variable."""
        self._refuse((), n_layers, "EAGLE_CAPTURE_IDS must be set")


def default_ids(n_layers: int) -> Sequence[int]:
    """``hf_eagle.default_eagle_aux_layer_ids``."""
    return sorted({1, max(0, n_layers // 2 - 1), max(0, n_layers - 4)})


CONVENTIONS: tuple[Convention, ...] = (
    Modelopt(),
    ModeloptHfDump(),
    ModeloptTrtDump(),
    ModeloptVllmDump(),
    ModeloptStreaming(),
)
