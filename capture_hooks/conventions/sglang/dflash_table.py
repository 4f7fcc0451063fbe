"""Which family of models follows which rule for DFlash and DSpark ids, since SGLang 0.5.11.

A name carries the last version of its rule where a later one replaced it.
"""

from __future__ import annotations

from typing import Final

from ..contract import Convention
from .dflash import Dflash, DflashBeforeLast, DflashInputs, DflashNever
from .table import (
    BOTH_ENDS,
    DEEPSEEK,
    DEEPSTACK,
    LLAMA,
    NO_DEEPSTACK,
    NO_EMBED,
    PIPELINE,
    QWEN3_5_TEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
    since,
)

TABLE: Final[tuple[Convention, ...]] = (
    since(
        *(
            Dflash,
            "sglang.dflash.llama",
            "0.5.11 to 0.5.23",
            (*LLAMA, "glm4_moe_lite", "llama4_text", "qwen3"),
        ),
        "srt/models/llama.py:943; qwen3.py:793; glm4_moe_lite.py:822; speculative/dflash_utils.py:552-585",
    ),
    since(
        *(Dflash, "sglang.dflash.glm5_next", "0.5.20 to 0.5.23", ("glm5_next", "glm5_next_text")),
        "srt/models/glm5_next.py:1117,1545",
        f"{BOTH_ENDS} With mhc in the target's config the state is the mean of its streams.",
    ),
    since(
        *(Dflash, "sglang.dflash.deepseek", "0.5.17 to 0.5.23", (*DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py:3175,3475; layers/aux_hidden_states.py:86; kimi_k25.py:941",
        packed=True,
    ),
    since(
        *(Dflash, "sglang.dflash.deepseek-0.5.16", "0.5.11 to 0.5.16", (*DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py: set_dflash_layers_to_capture and the loop; kimi_k25.py",
    ),
    since(
        *(Dflash, "sglang.dflash.gpt_oss", "0.5.17 to 0.5.23", ("gpt_oss",)),
        "srt/models/gpt_oss.py:711-738,1354",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Dflash, "sglang.dflash.gpt_oss-0.5.16", "0.5.11 to 0.5.16", ("gpt_oss",)),
        "srt/models/gpt_oss.py: set_dflash_layers_to_capture and the loop",
    ),
    since(
        *(Dflash, "sglang.dflash.qwen3_moe", "0.5.11 to 0.5.23"),
        ("qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next"),
        "srt/models/qwen3_moe.py:987,1145; qwen3_next.py:959,1303; qwen3_vl.py:1680; qwen3_5.py:1889",
        memory="marks",
    ),
    since(
        *(Dflash, "sglang.dflash.qwen3_vl_moe", "0.5.19 to 0.5.23", QWEN3_VL_MOE),
        "srt/models/qwen3_vl.py:1680; qwen3_moe.py:987; qwen3_vl_moe.py:123-137",
        DEEPSTACK,
        memory="both",
        entering=True,
    ),
    since(
        *(Dflash, "sglang.dflash.qwen3_vl_moe-0.5.18", "0.5.11 to 0.5.18", QWEN3_VL_MOE),
        "srt/models/qwen3_vl.py: set_dflash_layers_to_capture; qwen3_vl_moe.py: its loop",
        NO_DEEPSTACK,
        memory="both",
    ),
    since(
        *(Dflash, "sglang.dflash.intern_s2", "0.5.12 to 0.5.23", ("intern_s2_preview",)),
        "srt/models/interns2preview.py; qwen3_5.py:1889",
        memory="marks",
    ),
    since(
        *(Dflash, "sglang.dflash.mellum", "0.5.16 to 0.5.23", ("mellum",)),
        "srt/models/mellum.py; qwen3_moe.py:987,1145",
        memory="marks",
    ),
    since(
        *(Dflash, "sglang.dflash.interns2_mobius", "0.5.18 to 0.5.23", ("interns2_mobius",)),
        "srt/models/interns2_mobius.py; qwen3_5.py:1889",
        memory="marks",
    ),
    since(
        *(Dflash, "sglang.dflash.minicpmv", "0.5.23", ("minicpmv4_6",)),
        "srt/models/minicpmv.py:1469; qwen3_5.py:1889",
        memory="marks",
    ),
    since(
        *(DflashBeforeLast, "sglang.dflash.qwen3_5_text", "0.5.19 to 0.5.23", QWEN3_5_TEXT),
        "srt/models/qwen3_5_text.py:134-148; qwen3_5.py:1889",
        memory="marks",
    ),
    since(
        *(DflashInputs, "sglang.dflash.qwen3_5_text-0.5.18", "0.5.18", QWEN3_5_TEXT),
        "srt/models/qwen3_5_text.py:150-158; qwen3_5.py: set_dflash_layers_to_capture",
        f"The output of the last layer cannot be captured; other models add one to these ids. {PIPELINE}",
        memory="marks",
    ),
    since(
        *(Dflash, "sglang.dflash.gemma4", "0.5.14 to 0.5.23", ("gemma4", "gemma4_text", "gemma4_unified")),
        "srt/models/gemma4_causal.py:1208; gemma4_mm.py:317",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Dflash, "sglang.dflash.laguna", "0.5.15 to 0.5.23", ("laguna",)),
        "srt/models/laguna.py:594-609,833",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Dflash, "sglang.dflash.lfm2", "0.5.19 to 0.5.23", ("lfm2", "lfm2_moe", "nemotron_h")),
        "srt/models/lfm2.py:541-579,719; lfm2_moe.py:546,632; nemotron_h.py:878-898,1225",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Dflash, "sglang.dflash.mimo_v2", "0.5.20 to 0.5.23", ("mimo_v2_flash",)),
        "srt/models/mimo_v2.py:1154-1195,1501",
        NO_EMBED,
        end=True,
        packed=True,
    ),
    since(
        *(Dflash, "sglang.dflash.lfm2_vl", "0.5.21 to 0.5.23", ("lfm2_vl",)),
        "srt/models/lfm2_vl.py:185; lfm2.py:719",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Dflash, "sglang.dflash.muse_spark", "0.5.23", ("muse_spark", "muse_spark_text")),
        "srt/models/muse_spark.py:1222,1336",
        NO_EMBED,
        end=True,
    ),
    since(
        *(Dflash, "sglang.dflash.minimax_m3_vl", "0.5.23", ("minimax_m3_vl",)),
        "srt/models/minimax_m3_vl.py:272-286",
        f"{NO_EMBED} The DSPARK algorithm takes any order.",
        end=True,
        ascending=True,
    ),
    since(
        *(Dflash, "sglang.dflash.beam", "0.5.23", ("beam",)),
        "srt/models/beam.py:1167,1360",
        NO_EMBED,
        end=True,
        ascending=True,
    ),
    since(
        *(DflashInputs, "sglang.dflash.muse_glimmer", "0.5.18 to 0.5.23", ("muse_glimmer",)),
        "srt/models/muse_glimmer.py:421-424,866; spec_aux_hidden_state.py:18-28",
        "The output of the last layer cannot be captured. Since 0.5.19 one is added to the ids of a draft "
        "whose architecture is DFlash2DraftModel or MuseGlimmerAssistantModel, which makes them outputs.",
    ),
    # By the DSPARK algorithm alone.
    since(
        *(Dflash, "sglang.dspark.kimi_linear", "0.5.17 to 0.5.23", ("kimi_linear",)),
        "srt/models/kimi_linear.py:741-747,803",
        f"{NO_EMBED} The DFLASH algorithm is refused.",
        end=True,
    ),
    since(
        *(Dflash, "sglang.dspark.bailing_hybrid", "0.5.19 to 0.5.23", ("bailing_hybrid",)),
        "srt/models/bailing_moe_v3.py:1339-1369,1731",
        f"{NO_EMBED} The DFLASH algorithm is refused.",
        end=True,
    ),
    # Nothing that has a name.
    since(
        *(DflashNever, "sglang.dflash.qwen3_vl", "0.5.11 to 0.5.23", QWEN3_VL),
        "srt/models/qwen3_vl.py:1169,1680",
        "Nothing can be captured: the inner model has no such setter.",
        why="the inner model has no set_dflash_layers_to_capture: the server stops with an AttributeError",
    ),
    since(
        *(DflashNever, "sglang.dflash.many_streams", "0.5.17 to 0.5.23"),
        ("deepseek_v4", "inkling_mm_model", "kimi_k3", "nanbeige"),
        "srt/models/deepseek_v4.py:4203; inkling.py:826; kimi_k3.py:2955; nanbeige.py:348",
        "Nothing is expressible: several streams mixed, several passes over the layers, or half a layer.",
        why="what is captured is no point of one residual stream (a mean of several streams, a state of a "
        "later pass over the same layers, or of the middle of a layer)",
        rank="read",
    ),
    since(
        *(DflashNever, "sglang.dflash.none", "0.5.11 to 0.5.23", ()),
        "srt/model_executor/model_runner_components/attention_backend_setup.py:62-73",
        "No ids mean anything: it has no DFlash capture for a model type that no other convention names.",
        why="no DFlash or DSpark capture is known for this model type; the server stops",
    ),
)
