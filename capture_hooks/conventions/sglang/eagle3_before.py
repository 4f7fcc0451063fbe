"""Rules for EAGLE-3 ids that a later version of SGLang replaced, from 0.5.9.

A name carries the last version of its rule: ``sglang.llama-0.5.21`` is what ``sglang.llama`` was until then.
Sources are lines of that version.
"""

from __future__ import annotations

from typing import Final

from ..contract import Convention
from .eagle3 import Eagle3, FirstIdDecides, LaterDefault, Never
from .table import (
    BOTH_ENDS,
    DEEPSEEK,
    DEEPSTACK,
    FIRST_ONE,
    GATHERING,
    INTERN_S2,
    LLAMA,
    MARKED,
    NO_DEEPSTACK,
    QWEN2,
    QWEN3_5,
    QWEN3_VL,
    QWEN3_VL_MOE,
    SINGLE,
    since,
)

GRAPHS: Final = (
    "Up to 0.5.10 the CUDA graphs of decoding are captured with the default layers, and other ids hold only "
    f"where they are switched off. {BOTH_ENDS}"
)
NOTHING: Final = "its setter fills a list, its loop looks at marks on the layers: nothing is captured"

BEFORE: Final[tuple[Convention, ...]] = (
    since(
        *(Eagle3, "sglang.llama-0.5.21", "0.5.11 to 0.5.21", (*LLAMA, *SINGLE)),
        "srt/models/llama.py: set_eagle3_layers_to_capture, LlamaModel.forward (hidden_states + residual)",
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.glm4_moe-0.5.20", "0.5.11 to 0.5.20", GATHERING),
        "srt/models/glm4_moe.py:1100; llama4.py:535; longcat_flash.py:663 (hidden_states + residual)",
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.qwen3_vl-0.5.18", "0.5.11 to 0.5.18", (*QWEN3_VL, *QWEN3_VL_MOE)),
        "srt/models/qwen3_vl.py: set_eagle3_layers_to_capture; qwen3_vl_moe.py: its loop",
        NO_DEEPSTACK,
    ),
    since(
        *(Never, "sglang.qwen3_5-0.5.21", "0.5.11 to 0.5.21", (*QWEN3_5, *INTERN_S2)),
        "srt/models/qwen3_vl.py: set_eagle3_layers_to_capture; qwen3_5.py: its loop",
        "Nothing can be captured: the setter and the loop do not fit together.",
        why=NOTHING,
    ),
    since(
        *(Eagle3, "sglang.qwen3_vl_moe-0.5.21", "0.5.19 to 0.5.21", QWEN3_VL_MOE),
        "srt/models/qwen3_vl.py: set_eagle3_layers_to_capture; qwen3_vl_moe.py: its loop",
        DEEPSTACK,
        entering=True,
    ),
    since(
        *(FirstIdDecides, "sglang.deepseek-0.5.16", "0.5.14 to 0.5.16", (*DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py: set_eagle3_layers_to_capture and the loop",
        FIRST_ONE,
    ),
    since(
        *(FirstIdDecides, "sglang.deepseek-0.5.13", "0.5.13", (*DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py:2446-2453 (hidden_states + residual)",
        FIRST_ONE,
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.deepseek-0.5.12", "0.5.11 to 0.5.12", (*DEEPSEEK, "glm4_moe_lite", "kimi_k25")),
        "srt/models/deepseek_v2.py: set_eagle3_layers_to_capture and the loop",
        embedding=False,
    ),
    since(
        *(FirstIdDecides, "sglang.glm4_moe_lite-0.5.20", "0.5.13 to 0.5.20", ("glm4_moe_lite",)),
        "srt/models/glm4_moe_lite.py:835 (hidden_states + residual)",
        FIRST_ONE,
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.gpt_oss-0.5.16", "0.5.11 to 0.5.16", ("gpt_oss",)),
        "srt/models/gpt_oss.py: set_eagle3_layers_to_capture and the loop",
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.minimax_m3-0.5.22", "0.5.18 to 0.5.22", ("minimax_m3",)),
        "srt/models/minimax_m3.py: set_eagle3_layers_to_capture and the loop",
    ),
    since(
        *(Never, "sglang.minimax_m3-0.5.17", "0.5.16 to 0.5.17", ("minimax_m3",)),
        "srt/models/minimax_m3.py: set_eagle3_layers_to_capture and the loop",
        "Nothing can be captured: the setter and the loop do not fit together.",
        why=NOTHING,
    ),
    since(
        *(LaterDefault, "sglang.minimax_m3_vl-0.5.22", "0.5.18 to 0.5.22", ("minimax_m3_vl",)),
        "srt/models/minimax_m3_vl.py: set_eagle3_layers_to_capture",
        f"{BOTH_ENDS} Without ids it captures one layer deeper than every other model.",
    ),
    since(
        *(Eagle3, "sglang.llama-0.5.10", "0.5.9 to 0.5.10"),
        (*LLAMA, *SINGLE, *GATHERING, *DEEPSEEK, "glm4_moe_lite", "gpt_oss", "minimax_m2"),
        "srt/model_executor/cuda_graph_runner.py:648; models/llama.py (hidden_states + residual)",
        GRAPHS,
        graphs_take_default=True,
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.kimi_k25-0.5.10", "0.5.10", ("kimi_k25",)),
        "srt/models/kimi_k25.py; deepseek_v2.py; model_executor/cuda_graph_runner.py:648",
        GRAPHS,
        graphs_take_default=True,
        embedding=False,
    ),
    since(
        *(Eagle3, "sglang.qwen2-0.5.10", "0.5.9 to 0.5.10", QWEN2),
        "srt/model_executor/cuda_graph_runner.py:648; models/qwen2.py",
        GRAPHS,
        graphs_take_default=True,
    ),
    since(
        *(Eagle3, "sglang.sarvam_moe-0.5.10", "0.5.10", ("sarvam_moe",)),
        "srt/model_executor/cuda_graph_runner.py:648; models/sarvam_moe.py; bailing_moe.py",
        GRAPHS,
        graphs_take_default=True,
    ),
    since(
        *(Eagle3, "sglang.qwen3_moe-0.5.10", "0.5.9 to 0.5.10", MARKED),
        "srt/model_executor/cuda_graph_runner.py:648; models/qwen2_moe.py",
        GRAPHS,
        graphs_take_default=True,
        memory="marks",
    ),
)
