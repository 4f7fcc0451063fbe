"""TensorRT-LLM: ``eagle3_layers_to_capture`` of the caller's settings; the head's config is not looked at.

A layer whose index is in the set adds its output and residual to a buffer, and -1 stands for what the model
returns, after its final norm.  The set is sorted, so where a server reads it -1 comes first; where hidden
states are saved for training (and in the deprecated two-model drafter) -1 is moved to the end.  A head
trained on such a dump with -1 among its inputs is served with its columns rotated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import ConventionError
from ...spec import Point
from ..contract import Captured, Convention, Order, Rank, Reader, Reading
from .table import TableConvention, outputs

_FILES = "tensorrt_llm/_torch/speculative/eagle3.py"


class TensorrtLlm(TableConvention):
    """Id k is ``post.k``, and -1 is ``final_norm``, in front."""

    name: ClassVar[str] = "tensorrt_llm"
    library = "tensorrt_llm"
    versions: ClassVar[str] = "1.2 to 1.3"
    key: ClassVar[str] = "eagle3_layers_to_capture"
    source: ClassVar[str] = (
        f"{_FILES}: Eagle3OneModelSpecMetadata.__post_init__ and maybe_capture_hidden_states; "
        "_torch/models/modeling_speculative.py: SpecDecOneEngineForCausalLM.forward (layer_idx = -1); "
        "read at f933a608 and in a later file that announces removals in release 1.4"
    )
    limits: ClassVar[str] = (
        "The embedding cannot be captured. Ids are a setting of the caller and not of the head's config; "
        "without them eagle3_model_arch mistral_large3 takes {-1}."
    )
    order: ClassVar[Order] = "depth"
    twice = "once"
    outside: ClassVar[str] = (
        "is the output of no layer, so nothing is written to its columns: they hold what the buffer held"
    )

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """The outputs, and -1."""
        return {-1: Point("final_norm"), **outputs(n_layers)}

    def default(self, n_layers: int) -> Captured:
        """The usual three; the only layer of a model that has one; refused below six layers."""
        if n_layers == 1:
            return self.taken([0], n_layers)
        if n_layers <= 5:
            raise ConventionError(
                f"{self.name}: it stops with 'Not enough hidden layers for default EAGLE3 capture' "
                f"for a model of {n_layers} layers"
            )
        return self.taken([1, n_layers // 2 - 1, n_layers - 4], n_layers)


class TensorrtLlmDump(TensorrtLlm):
    """As `TensorrtLlm`, but -1 is moved to the end."""

    name = "tensorrt_llm.dump"
    key = "SaveHiddenStatesDecodingConfig.eagle3_layers_to_capture"
    primary = False
    source = (
        "tensorrt_llm/_torch/speculative/save_hidden_state.py: SaveHiddenStatesSpecMetadata; "
        f"{_FILES}: Eagle3SpecMetadata (two models); read at f933a608 and in a later file"
    )
    limits = (
        "The embedding cannot be captured. The final norm is always saved as hidden_state; it is among "
        "aux_hidden_states only where -1 is in the set."
    )

    def place(self, number: int) -> int:
        """-1 goes behind every layer."""
        return number if number >= 0 else sys.maxsize

    def default(self, n_layers: int) -> Captured:
        """The usual three, and the final norm beside them; refused below six layers."""
        if n_layers == 1:
            self._refuse((), n_layers, "it has not enough layers for the default")
        return super().default(n_layers)


class TensorrtLlmReader(Reader):
    """It takes nothing about layers from a head's config: the caller's setting, or the default."""

    name = "tensorrt_llm"
    library = TensorrtLlm.library
    versions = TensorrtLlm.versions
    source = (
        "tensorrt_llm/llmapi/llm_args.py: EagleDecodingConfig; _torch/speculative/utils.py: "
        "get_spec_metadata passes spec_config.eagle3_layers_to_capture and nothing of the draft's config"
    )
    rank: ClassVar[Rank] = "read"
    read_on = TensorrtLlm.read_on

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """What it captures where the caller names no layers."""
        try:
            return Reading(TensorrtLlm.name, None, None, CONVENTIONS[0].default(n_layers))
        except ConventionError as error:
            return Reading(TensorrtLlm.name, None, None, None, str(error))


CONVENTIONS: tuple[Convention, ...] = (TensorrtLlm(), TensorrtLlmDump())
READERS: tuple[Reader, ...] = (TensorrtLlmReader(),)
