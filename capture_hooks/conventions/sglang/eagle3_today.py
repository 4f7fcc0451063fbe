"""Which family of models follows which rule for EAGLE-3 ids in SGLang 0.5.23, and since when."""

from __future__ import annotations

from typing import Final

from ..contract import Convention
from .eagle3 import Eagle3, FirstIdDecides, LargestIdDecides, LaterDefault, Never, WithoutResidual
from .table import (
    BOTH_ENDS,
    DEEPSEEK,
    DEEPSTACK,
    FIRST_ONE,
    GATHERING,
    INTERN_S2,
    LLAMA,
    MARKED,
    NO_EMBED,
    PIPELINE,
    QWEN2,
    QWEN3_5,
    QWEN3_5_TEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
    SINGLE,
    since,
)

TODAY: Final[tuple[Convention, ...]] = (
    # Post: a list, asked before each layer.
    since(
        *(Eagle3, "sglang.llama", "0.5.22 to 0.5.23", (*LLAMA, *SINGLE)),
        "srt/models/llama.py:486-494,929-941; apertus.py:366,675; exaone_moe.py:600,866",
    ),
    since(
        *(Eagle3, "sglang.glm4_moe", "0.5.21 to 0.5.23", GATHERING),
        "srt/models/glm4_moe.py:949,1269; llama4.py:528; mllama4.py:971; longcat_flash.py:619,1112",
    ),
    since(
        *(Eagle3, "sglang.qwen2", "0.5.11 to 0.5.23", (*QWEN2, "minimax_m2", "sarvam_moe")),
        "srt/models/qwen2.py:456,781; qwen3.py:524,778; qwen2_5_vl.py:990; bailing_moe.py:829,1098; "
        "minimax_m2.py:981,1067; sarvam_moe.py",
    ),
    since(
        *(Eagle3, "sglang.glm5_next", "0.5.20 to 0.5.23", ("glm5_next", "glm5_next_text")),
        "srt/models/glm5_next.py:1174-1205,1533",
        f"{BOTH_ENDS} With mhc in the target's config the state is all its streams side by side.",
    ),
    since(
        *(Eagle3, "sglang.qwen3_vl", "0.5.19 to 0.5.23", QWEN3_VL),
        "srt/models/qwen3_vl.py:1230-1272,1777",
        DEEPSTACK,
        entering=True,
    ),
    since(
        *(Eagle3, "sglang.cosmos3", "0.5.20 to 0.5.23", ("cosmos3_omni",)),
        "srt/models/cosmos3.py:38; qwen3_vl.py:1777",
        DEEPSTACK,
        entering=True,
    ),
    # Post with marks on the layers.
    since(
        *(Eagle3, "sglang.qwen3_moe", "0.5.11 to 0.5.23", MARKED),
        "srt/models/qwen2_moe.py:1153,1200,1418; qwen3_moe.py:1128; qwen3_next.py:954,1286",
        memory="marks",
    ),
    since(
        *(Eagle3, "sglang.mellum", "0.5.16 to 0.5.23", ("mellum",)),
        "srt/models/mellum.py; qwen3_moe.py:1128",
        memory="marks",
    ),
    since(
        *(Eagle3, "sglang.qwen3_5", "0.5.22 to 0.5.23", (*QWEN3_5, *INTERN_S2)),
        "srt/models/qwen3_vl.py:1792; qwen3_5.py:1894,1951",
        memory="marks",
    ),
    since(
        *(Eagle3, "sglang.qwen3_5_text", "0.5.22 to 0.5.23", QWEN3_5_TEXT),
        "srt/models/qwen3_5_text.py:150,205; qwen3_5.py:1894,1951",
        memory="marks",
        goes_on=True,
    ),
    since(
        *(Eagle3, "sglang.qwen3_vl_moe", "0.5.22 to 0.5.23", QWEN3_VL_MOE),
        "srt/models/qwen3_vl.py:1792; qwen2_moe.py:1153; qwen3_vl_moe.py:123-137",
        DEEPSTACK,
        memory="both",
        entering=True,
    ),
    # The first id decides.
    since(
        *(FirstIdDecides, "sglang.deepseek", "0.5.17 to 0.5.23", (*DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py:3175,3193,3458-3473; layers/aux_hidden_states.py:86; kimi_k25.py:928",
        FIRST_ONE,
        packed=True,
    ),
    since(
        *(FirstIdDecides, "sglang.glm4_moe_lite", "0.5.21 to 0.5.23", ("glm4_moe_lite",)),
        "srt/models/glm4_moe_lite.py:656,805",
        FIRST_ONE,
    ),
    # The largest id decides.
    since(
        *(LargestIdDecides, "sglang.gpt_oss", "0.5.17 to 0.5.23", ("gpt_oss",)),
        "srt/models/gpt_oss.py:711-738,1337-1352",
        f"The embedding can be captured only together with the output of the last layer. {PIPELINE}",
    ),
    # A last look after the last layer.
    since(
        *(Eagle3, "sglang.gemma4", "0.5.12 to 0.5.23", ("gemma4", "gemma4_text")),
        "srt/models/gemma4_causal.py:1071-1094,1495; gemma4_mm.py:1155",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Eagle3, "sglang.gemma4_unified", "0.5.13 to 0.5.23", ("gemma4_unified",)),
        "srt/models/gemma4_unified.py; gemma4_causal.py:1071-1094; gemma4_mm.py:1155",
        NO_EMBED,
        end=True,
    ),
    since(
        *(WithoutResidual, "sglang.gemma3", "0.5.12 to 0.5.23", ("gemma3_text",)),
        "srt/models/gemma3_causal.py:637-672,917",
        "No point of the residual stream can be captured: its loop leaves out the residual.",
        layers="model.layers",
    ),
    since(
        *(WithoutResidual, "sglang.gemma3_mm", "0.5.12 to 0.5.23", ("gemma3",)),
        "srt/models/gemma3_mm.py:543; gemma3_causal.py:637-672",
        "No point of the residual stream can be captured: its loop leaves out the residual.",
        layers="model.language_model.layers",
    ),
    since(
        *(Eagle3, "sglang.minimax_m3", "0.5.23", ("minimax_m3",)),
        "srt/models/minimax_m3.py:1949-1965,2056",
        NO_EMBED,
        end=True,
    ),
    since(
        *(LaterDefault, "sglang.minimax_m3_vl", "0.5.23", ("minimax_m3_vl",)),
        "srt/models/minimax_m3_vl.py:246-270,309",
        "The embedding cannot be captured; without ids it captures post.2, post.(n//2), post.(n-3), "
        f"where every other model captures post.1, post.(n//2-1), post.(n-4). {PIPELINE}",
        end=True,
    ),
    # Nothing.
    since(
        *(Never, "sglang.many_streams", "0.5.20 to 0.5.23", ("qwen4_exp",)),
        "srt/models/qwen4_exp.py:2152-2173 (returns hidden_states, hc_hidden_states)",
        "Nothing is expressible: the model carries several streams.",
        why="these models carry several residual streams, and hand those over whatever the ids",
        rank="read",
    ),
    since(
        *(Never, "sglang.none", "0.5.9 to 0.5.23", ()),
        "srt/model_executor/model_runner_components/attention_backend_setup.py:55-61",
        "No ids mean anything: it has no EAGLE-3 capture for a model type that no other convention names.",
        why="no EAGLE-3 capture is known for this model type; the server stops with "
        "'does not implement set_eagle3_layers_to_capture'",
    ),
)
