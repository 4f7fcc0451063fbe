"""llama.cpp: ``target_layers`` of a GGUF file, inputs of layers, in the order of the list.

The converter copies an EAGLE-3 head's top-level ids as they are and adds one to a DFlash head's.  A target's
graph has to expose its layers' inputs, which those of 19 architectures do.  Id n is one more tensor: the
un-normed end in some graphs, the final norm in others, and in most, memory that nothing was written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from ...spec import Point
from ..contract import Captured, Convention
from .table import TableConvention

_VERSION = "0.3.36"
_READ = f"ggml-org/llama.cpp 0c1e57098, as vendored in llama-cpp-python {_VERSION}"
_EAGLE3 = f"{_READ}: conversion/llama.py:74-83; common/speculative.cpp:500-549,628-634"
_DFLASH = f"{_READ}: conversion/qwen.py:735-738; common/speculative.cpp:1057-1058,1153-1156"
_KEY = "eagle_aux_hidden_state_layer_ids"
_DFLASH_KEY = "dflash_config.target_layer_ids"
_PREFIX = "llama-cpp-python's version is stated, because llama.cpp has builds only."
#: Model types whose graphs set t_layer_inp, by what they hand out as t_h_nextn, which is taken for id n.
_NOTHING = (
    *("hunyuan_vl", "lfm2", "lfm2_moe", "llama", "minimax", "minimax_m2", "mistral", "mixtral"),
    *("nanbeige", "qwen3", "qwen3_moe"),
)
_END = ("gpt_oss", "mimo_v2_flash")
_FINAL_NORM = (
    *("gemma4", "gemma4_text", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "qwen3_next",
)


class LlamaCpp(TableConvention):
    """EAGLE-3: id k is ``pre.k`` for k < n; exactly three, in the order of the list."""

    name: ClassVar[str] = "llama_cpp"
    library = "llama_cpp"
    versions = _VERSION
    families: ClassVar[tuple[str, ...]] = _NOTHING
    key: ClassVar[str] = _KEY
    source: ClassVar[str] = f"{_EAGLE3}; src/models/llama.cpp:127; src/llama-context.cpp:2022,2143-2148"
    limits: ClassVar[str] = f"The output of the last layer cannot be captured, normed or not. {_PREFIX}"
    count: ClassVar[int | None] = 3
    outside: ClassVar[str] = (
        "is no layer's input that this target's graph exposes: it aborts, or, for n, reads a buffer that is "
        "never filled"
    )

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's input."""
        return {k: Point.pre(k) if k else Point("embed") for k in range(n_layers)}

    def default(self, n_layers: int) -> Captured:
        """The inputs of layers 2, n//2 and n-3 in that order, whatever they are in a shallow model."""
        return self.taken([2, n_layers // 2, n_layers - 3], n_layers)


class LlamaCppToEnd(LlamaCpp):
    """As `LlamaCpp`, and n is the un-normed end."""

    name = "llama_cpp.to_end"
    families = _END
    source = f"{_EAGLE3}; src/models/openai-moe.cpp:155, mimo2.cpp:246 (t_h_nextn before the norm)"
    limits = f"final_norm cannot be captured. {_PREFIX}"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's input, and the last one's output."""
        return {**super().states(n_layers), n_layers: Point.post(n_layers - 1)}


class LlamaCppFinalNorm(LlamaCpp):
    """As `LlamaCpp`, and n is ``final_norm``."""

    name = "llama_cpp.final_norm"
    families = _FINAL_NORM
    source = (
        f"{_EAGLE3}; src/models/gemma4.cpp:415, nemotron-h.cpp:249, qwen35.cpp:209, qwen35moe.cpp:233, "
        "qwen3next.cpp:207 (t_h_nextn after the norm)"
    )
    limits = f"The un-normed end cannot be captured. {_PREFIX}"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's input, and the final norm."""
        return {**super().states(n_layers), n_layers: Point("final_norm")}


class LlamaCppNone(LlamaCpp):
    """Every other family: its graph exposes no layer's input, or was not looked at."""

    name = "llama_cpp.none"
    families = ()
    source = f"{_READ}: src/llama-graph.cpp:1384 ('layer input tensor is null')"
    limits = f"No ids mean anything for a model type that no other convention names. {_PREFIX}"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """None."""
        return {}


class LlamaCppDflash(LlamaCpp):
    """DFlash: id k is ``pre.(k+1)``, that is ``post.k``, for k < n-1."""

    name = "llama_cpp.dflash"
    families = (*_NOTHING, "gpt_oss", *(family for family in _FINAL_NORM if family != "nemotron_h"))
    key: ClassVar[str] = _DFLASH_KEY
    primary = False
    source = _DFLASH
    outside = "is no layer's input that this target's graph exposes: it aborts"
    limits = f"Neither the embedding nor the output of the last layer can be captured. {_PREFIX}"
    count = None

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output but the last."""
        return {k: Point.post(k) for k in range(n_layers - 1)}

    def stray(self, number: int, n_layers: int) -> Point | None:
        """-1 becomes the input of layer 0."""
        return Point("embed") if number == -1 else None

    def default(self, n_layers: int) -> Captured:
        """None: the file then lacks target_layers, and is not loaded."""
        self._refuse((), n_layers, "it stops with \"DFlash model requires 'target_layers' in GGUF metadata\"")


class LlamaCppDflashToEnd(LlamaCppDflash):
    """As `LlamaCppDflash`, the last layer included."""

    name = "llama_cpp.dflash_to_end"
    families = ("mimo_v2_flash", "nemotron_h")
    source = f"{_DFLASH}; src/models/mimo2.cpp:238, nemotron-h.cpp:238 (t_layer_inp[n_layer])"
    limits = f"Neither the embedding nor final_norm can be captured. {_PREFIX}"

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """Every layer's output."""
        return {k: Point.post(k) for k in range(n_layers)}


class LlamaCppDflashNone(LlamaCppDflash):
    """Every other family, as `LlamaCppNone`."""

    name = "llama_cpp.dflash_none"
    families = ()
    source = LlamaCppNone.source
    limits = LlamaCppNone.limits

    def states(self, n_layers: int) -> Mapping[int, Point]:
        """None."""
        return {}

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Never possible."""
        return Captured(self.to_points(ids, n_layers))


CONVENTIONS: tuple[Convention, ...] = (
    LlamaCpp(),
    LlamaCppToEnd(),
    LlamaCppFinalNorm(),
    LlamaCppNone(),
    LlamaCppDflash(),
    LlamaCppDflashToEnd(),
    LlamaCppDflashNone(),
)
