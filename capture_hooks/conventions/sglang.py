"""SGLang: ``eagle_config.eagle_aux_hidden_state_layer_ids``, read by each target model's own setter.

A model's ``set_eagle3_layers_to_capture`` turns the ids into boundaries ("capture what enters layer i"):
most add one, so that id k is ``post.k``; two families guess from the numbers.  The states a model then
captures depend on its loop: most visit boundaries 0 to n-1 and never see the un-normed end, some do.
The nested key is the only one it reads; a top-level list is ignored without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ..errors import ConventionError
from ..spec import Point
from .boundaries import BoundaryConvention
from .contract import Captured, Convention, Order, Rank

_PIPELINE = "Under pipeline parallelism only layers of the last rank are captured."


class _Sglang(BoundaryConvention):
    library: ClassVar[str] = "sglang"
    versions: ClassVar[str] = "0.5.23"
    key: ClassVar[str] = "eagle_config.eagle_aux_hidden_state_layer_ids"
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-29"

    def lowest(self, n_layers: int) -> int:
        # Boundary 0 would be id -1: it works in some loops by accident, and nothing validates it.
        return 1

    def highest(self, n_layers: int) -> int:
        return n_layers - 1

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return [number + 1 for number in ids]

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        return [boundary - 1 for boundary in boundaries]


class SglangPost(_Sglang):
    """Id k is ``post.k``, for k up to n-2."""

    name = "sglang.llama"
    families = (
        *(
            "apertus",
            "bailing_moe",
            "bailing_moe_v2",
            "exaone_moe",
            "glm4_moe",
            "glm5_next",
            "glm5_next_text",
        ),
        *("internlm3", "iquestcoder"),
        *("llama", "llama4", "llama4_text", "longcat_flash", "mellum", "minimax_m2", "ministral3", "mistral"),
        *("phi3", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
        *("qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp"),
    )
    source = (
        "srt/models/llama.py:486-494,929-941; qwen2_moe.py:1153,1418; qwen3_moe.py:988,1128; qwen3_vl.py:1777"
    )
    limits = f"Neither the embedding nor the output of the last layer can be captured. {_PIPELINE}"
    outside = (
        "its models never capture (the embedding would be id -1; at the output of the last layer, qwen2_moe, "
        "qwen3_moe, qwen3_next and qwen3_5 fail with an IndexError, and the others leave it out silently)"
    )


class SglangPostToEnd(_Sglang):
    """Id k is ``post.k``, for k up to n-1: these models look once more after their loop."""

    name: ClassVar[str] = "sglang.gemma3"
    families: ClassVar[tuple[str, ...]] = (
        "gemma3",
        "gemma3_text",
        "gemma4",
        "gemma4_text",
        "gemma4_unified",
        "minimax_m3",
    )
    source = (
        "srt/models/gemma3_causal.py:669-672,917; gemma4_causal.py:1091-1094; minimax_m3.py:1955-1967,2056"
    )
    limits = f"The embedding cannot be captured. {_PIPELINE}"
    outside = "its ids do not reach (the embedding would be id -1)"

    def highest(self, n_layers: int) -> int:
        return n_layers


class SglangMinimaxM3Vl(SglangPostToEnd):
    """As `SglangPostToEnd`; what differs is its default, one layer deeper than every other model's."""

    name = "sglang.minimax_m3_vl"
    families = ("minimax_m3_vl",)
    source = "srt/models/minimax_m3_vl.py:246-270"
    limits = (
        "The embedding cannot be captured; without ids it captures post.2, post.(n//2), post.(n-3), "
        f"where every other model captures post.1, post.(n//2-1), post.(n-4). {_PIPELINE}"
    )


class SglangDeepseek(_Sglang):
    """Id k is ``post.k`` when the first id is 1, and ``pre.k`` otherwise."""

    name = "sglang.deepseek"
    families = (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
        *("kimi_k2", "kimi_k25"),
    )
    source = "srt/models/deepseek_v2.py:3193,3458-3478; glm4_moe_lite.py:805; kimi_k25.py:928"
    limits = (
        "The output of the last layer cannot be captured, and post.0 cannot come first: its id 0 would have "
        f"to be written as pre.1, and a list that starts with 1 is read as outputs. {_PIPELINE}"
    )
    outside = "these models never capture"

    def lowest(self, n_layers: int) -> int:
        return 0

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return [number + 1 for number in ids] if ids[0] == 1 else list(ids)

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        if boundaries[0] == 2:  # both spellings work; this one also means the same to every other family
            return [boundary - 1 for boundary in boundaries]
        if boundaries[0] == 1:
            self._refuse(
                [self.point(boundary, n_layers) for boundary in boundaries],
                n_layers,
                "post.0 comes first; the ids would start with 1, and then each is read as one layer deeper",
            )
        return list(boundaries)


class SglangGptOss(_Sglang):
    """Id k is ``pre.k`` when the largest id is n, and ``post.k`` otherwise."""

    name = "sglang.gpt_oss"
    families = ("gpt_oss",)
    source = "srt/models/gpt_oss.py:706-736,1337-1358"
    limits = f"The embedding can be captured only together with the output of the last layer. {_PIPELINE}"
    outside = "its models do not have"

    def lowest(self, n_layers: int) -> int:
        return 0

    def highest(self, n_layers: int) -> int:
        return n_layers

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return list(ids) if max(ids) == n_layers else [number + 1 for number in ids]

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        if boundaries[0] > 0:  # as every other family reads them
            return [boundary - 1 for boundary in boundaries]
        if boundaries[-1] < n_layers:
            self._refuse(
                [self.point(boundary, n_layers) for boundary in boundaries],
                n_layers,
                f"the embedding is an id, 0, only in a list that ends with {n_layers}, the last output",
            )
        return list(boundaries)


class SglangNone(Convention):
    """Every other family: its model has no setter, and SGLang refuses to start."""

    name = "sglang.none"
    library = "sglang"
    versions = "0.5.23"
    families = ()
    key = _Sglang.key
    source = "srt/model_executor/model_runner_components/attention_backend_setup.py:55-61"
    limits = (
        "No ids mean anything: SGLang has no EAGLE-3 capture for a model type that no other convention names."
    )

    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-29"
    order: ClassVar[Order] = "depth"

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Never possible."""
        self._refuse()

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Never possible."""
        self._refuse()

    def default(self, n_layers: int) -> Captured:
        """Never possible."""
        self._refuse()

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Never possible."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}): no EAGLE-3 capture is known for this model type; "
            "the server stops with 'does not implement set_eagle3_layers_to_capture'"
        )


#: In no particular order.
CONVENTIONS: tuple[Convention, ...] = (
    SglangPost(),
    SglangPostToEnd(),
    SglangMinimaxM3Vl(),
    SglangDeepseek(),
    SglangGptOss(),
    SglangNone(),
)
