"""Which family of models follows which rule of SGLang's, version by version, 0.5.9 to 0.5.23.

A convention's name carries the last version of its rule where a later one replaced it:
``sglang.llama-0.5.21`` is what ``sglang.llama`` was up to 0.5.21.  Line numbers are those of the last
version of each range.
"""

from __future__ import annotations

from typing import Any, Final

from ..contract import Convention
from .eagle3 import (
    PIPELINE,
    Eagle3,
    FirstIdDecides,
    LargestIdDecides,
    LaterDefault,
    Never,
    WithoutResidual,
)

_LLAMA: Final = ("internlm3", "iquestcoder", "llama", "ministral3", "mistral", "phi3")
_SINGLE: Final = ("apertus", "exaone_moe")
_GATHERING: Final = ("glm4_moe", "llama4", "llama4_text", "longcat_flash")
_QWEN2: Final = ("bailing_moe", "bailing_moe_v2", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3")
_MARKED: Final = ("qwen2_moe", "qwen3_moe", "qwen3_next")
_DEEPSEEK: Final = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2")
_QWEN3_5: Final = ("qwen3_5", "qwen3_5_moe")
_QWEN3_VL: Final = ("qwen3_vl", "qwen3_vl_text")
_QWEN3_VL_MOE: Final = ("qwen3_vl_moe", "qwen3_vl_moe_text")

_LEFT_OUT: Final = (
    "its models never capture (the embedding would be id -1; the last layer's output is never visited)"
)
_INDEX: Final = (
    "its models never capture (the embedding would be id -1; the last layer's output is an IndexError)"
)
_BOTH_ENDS: Final = f"Neither the embedding nor the output of the last layer can be captured. {PIPELINE}"
_DEEPSTACK: Final = (
    f"{_BOTH_ENDS} Where a prompt has images, what DeepStack adds after a layer is in the state."
)
_FIRST_ONE: Final = (
    "The output of the last layer cannot be captured, and post.0 cannot come first: its id 0 would have "
    f"to be written as pre.1, and a list that starts with 1 is read as outputs. {PIPELINE}"
)
_NO_EMBED: Final = f"The embedding cannot be captured. {PIPELINE}"
_GRAPHS: Final = (
    "Up to 0.5.10 the CUDA graphs of decoding are captured with the default layers, and other ids hold only "
    f"where they are switched off. {_BOTH_ENDS}"
)


def _since(
    rule: type[Eagle3] | type[Never],
    name: str,
    versions: str,
    families: tuple[str, ...],
    source: str,
    limits: str = _BOTH_ENDS,
    **differs: Any,
) -> Convention:
    """One rule in some versions for some families; ``differs`` are attributes of `model.SglangModel`."""
    said = {"outside": _INDEX if differs.get("memory", "list") != "list" else _LEFT_OUT, **differs}
    stated = {"name": name, "versions": versions, "families": families, "source": source, "limits": limits}
    made: Convention = type(rule.__name__, (rule,), {"__doc__": rule.__doc__, **said, **stated})()
    return made


_NOTHING: Final = "its setter fills a list, its loop looks at marks on the layers: nothing is captured"
_STREAMS: Final = "these models carry several residual streams, and hand those over whatever the ids"
_NO_SETTER: Final = (
    "no EAGLE-3 capture is known for this model type; the server stops with "
    "'does not implement set_eagle3_layers_to_capture'"
)

EAGLE3: Final[tuple[Convention, ...]] = (
    # Post: a list, asked before each layer.
    _since(
        *(Eagle3, "sglang.llama", "0.5.22 to 0.5.23", (*_LLAMA, *_SINGLE)),
        "srt/models/llama.py:486-494,929-941; apertus.py:366,675; exaone_moe.py:600,866",
    ),
    _since(
        *(Eagle3, "sglang.llama-0.5.21", "0.5.11 to 0.5.21", (*_LLAMA, *_SINGLE)),
        "srt/models/llama.py: set_eagle3_layers_to_capture, LlamaModel.forward (hidden_states + residual)",
        embedding=False,
    ),
    _since(
        *(Eagle3, "sglang.glm4_moe", "0.5.21 to 0.5.23", _GATHERING),
        "srt/models/glm4_moe.py:949,1269; llama4.py:528; mllama4.py:971; longcat_flash.py:619,1112",
    ),
    _since(
        *(Eagle3, "sglang.glm4_moe-0.5.20", "0.5.11 to 0.5.20", _GATHERING),
        "srt/models/glm4_moe.py:1100; llama4.py:535; longcat_flash.py:663 (hidden_states + residual)",
        embedding=False,
    ),
    _since(
        *(Eagle3, "sglang.qwen2", "0.5.11 to 0.5.23", (*_QWEN2, "minimax_m2", "sarvam_moe")),
        "srt/models/qwen2.py:456,781; qwen3.py:524,778; qwen2_5_vl.py:990; bailing_moe.py:829,1098; "
        "minimax_m2.py:981,1067; sarvam_moe.py",
    ),
    _since(
        *(Eagle3, "sglang.glm5_next", "0.5.20 to 0.5.23", ("glm5_next", "glm5_next_text")),
        "srt/models/glm5_next.py:1174-1205,1533",
        f"{_BOTH_ENDS} With mhc in the target's config the state is all its streams side by side.",
    ),
    _since(
        *(Eagle3, "sglang.qwen3_vl", "0.5.19 to 0.5.23", _QWEN3_VL),
        "srt/models/qwen3_vl.py:1230-1272,1777",
        _DEEPSTACK,
        entering=True,
    ),
    _since(
        *(Eagle3, "sglang.cosmos3", "0.5.20 to 0.5.23", ("cosmos3_omni",)),
        "srt/models/cosmos3.py:38; qwen3_vl.py:1777",
        _DEEPSTACK,
        entering=True,
    ),
    _since(
        *(Eagle3, "sglang.qwen3_vl-0.5.18", "0.5.11 to 0.5.18", (*_QWEN3_VL, *_QWEN3_VL_MOE)),
        "srt/models/qwen3_vl.py: set_eagle3_layers_to_capture; qwen3_vl_moe.py: its loop",
        f"{_BOTH_ENDS} Where a prompt has images, what DeepStack adds after a layer is not in the state.",
    ),
    # Post with marks on the layers.
    _since(
        *(Eagle3, "sglang.qwen3_moe", "0.5.11 to 0.5.23", _MARKED),
        "srt/models/qwen2_moe.py:1153,1200,1418; qwen3_moe.py:1128; qwen3_next.py:954,1286",
        memory="marks",
    ),
    _since(
        *(Eagle3, "sglang.mellum", "0.5.16 to 0.5.23", ("mellum",)),
        "srt/models/mellum.py; qwen3_moe.py:1128",
        memory="marks",
    ),
    _since(
        *(Eagle3, "sglang.qwen3_5", "0.5.22 to 0.5.23", (*_QWEN3_5, "intern_s2_preview", "interns2_mobius")),
        "srt/models/qwen3_vl.py:1792; qwen3_5.py:1894,1951",
        memory="marks",
    ),
    _since(
        *(
            Never,
            "sglang.qwen3_5-0.5.21",
            "0.5.11 to 0.5.21",
            (*_QWEN3_5, "intern_s2_preview", "interns2_mobius"),
        ),
        "srt/models/qwen3_vl.py: set_eagle3_layers_to_capture; qwen3_5.py: its loop",
        "Nothing can be captured: the setter and the loop do not fit together.",
        why=_NOTHING,
    ),
    _since(
        *(Eagle3, "sglang.qwen3_5_text", "0.5.22 to 0.5.23", ("qwen3_5_moe_text", "qwen3_5_text")),
        "srt/models/qwen3_5_text.py:150,205; qwen3_5.py:1894,1951",
        memory="marks",
        goes_on=True,
    ),
    _since(
        *(Eagle3, "sglang.qwen3_vl_moe", "0.5.22 to 0.5.23", _QWEN3_VL_MOE),
        "srt/models/qwen3_vl.py:1792; qwen2_moe.py:1153; qwen3_vl_moe.py:123-137",
        _DEEPSTACK,
        memory="both",
        entering=True,
    ),
    _since(
        *(Eagle3, "sglang.qwen3_vl_moe-0.5.21", "0.5.19 to 0.5.21", _QWEN3_VL_MOE),
        "srt/models/qwen3_vl.py: set_eagle3_layers_to_capture; qwen3_vl_moe.py: its loop",
        _DEEPSTACK,
        entering=True,
    ),
    # The first id decides.
    _since(
        *(FirstIdDecides, "sglang.deepseek", "0.5.17 to 0.5.23", (*_DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py:3175,3193,3458-3473; layers/aux_hidden_states.py:86; kimi_k25.py:928",
        _FIRST_ONE,
        outside="these models never capture",
        packed=True,
    ),
    _since(
        *(FirstIdDecides, "sglang.deepseek-0.5.16", "0.5.14 to 0.5.16", (*_DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py: set_eagle3_layers_to_capture and the loop",
        _FIRST_ONE,
        outside="these models never capture",
    ),
    _since(
        *(FirstIdDecides, "sglang.deepseek-0.5.13", "0.5.13", (*_DEEPSEEK, "kimi_k25")),
        "srt/models/deepseek_v2.py:2446-2453 (hidden_states + residual)",
        _FIRST_ONE,
        outside="these models never capture",
        embedding=False,
    ),
    _since(
        *(Eagle3, "sglang.deepseek-0.5.12", "0.5.11 to 0.5.12", (*_DEEPSEEK, "glm4_moe_lite", "kimi_k25")),
        "srt/models/deepseek_v2.py: set_eagle3_layers_to_capture and the loop",
        embedding=False,
    ),
    _since(
        *(FirstIdDecides, "sglang.glm4_moe_lite", "0.5.21 to 0.5.23", ("glm4_moe_lite",)),
        "srt/models/glm4_moe_lite.py:656,805",
        _FIRST_ONE,
        outside="these models never capture",
    ),
    _since(
        *(FirstIdDecides, "sglang.glm4_moe_lite-0.5.20", "0.5.13 to 0.5.20", ("glm4_moe_lite",)),
        "srt/models/glm4_moe_lite.py:835 (hidden_states + residual)",
        _FIRST_ONE,
        outside="these models never capture",
        embedding=False,
    ),
    # The largest id decides.
    _since(
        *(LargestIdDecides, "sglang.gpt_oss", "0.5.17 to 0.5.23", ("gpt_oss",)),
        "srt/models/gpt_oss.py:711-738,1337-1352",
        f"The embedding can be captured only together with the output of the last layer. {PIPELINE}",
        outside="its models do not have",
    ),
    _since(
        *(Eagle3, "sglang.gpt_oss-0.5.16", "0.5.11 to 0.5.16", ("gpt_oss",)),
        "srt/models/gpt_oss.py: set_eagle3_layers_to_capture and the loop",
        embedding=False,
    ),
    # A last look after the last layer.
    _since(
        *(Eagle3, "sglang.gemma4", "0.5.12 to 0.5.23", ("gemma4", "gemma4_text", "gemma4_unified")),
        "srt/models/gemma4_causal.py:1071-1094,1495; gemma4_mm.py:1155",
        _NO_EMBED,
        outside="its ids do not reach (the embedding would be id -1)",
        end=True,
    ),
    _since(
        *(WithoutResidual, "sglang.gemma3", "0.5.12 to 0.5.23", ("gemma3_text",)),
        "srt/models/gemma3_causal.py:637-672,917",
        "No point of the residual stream can be captured: its loop leaves out the residual.",
        outside="its ids do not reach (the embedding would be id -1)",
        layers="model.layers",
    ),
    _since(
        *(WithoutResidual, "sglang.gemma3_mm", "0.5.12 to 0.5.23", ("gemma3",)),
        "srt/models/gemma3_mm.py:543; gemma3_causal.py:637-672",
        "No point of the residual stream can be captured: its loop leaves out the residual.",
        outside="its ids do not reach (the embedding would be id -1)",
        layers="model.language_model.layers",
    ),
    _since(
        *(Eagle3, "sglang.minimax_m3", "0.5.23", ("minimax_m3",)),
        "srt/models/minimax_m3.py:1949-1965,2056",
        _NO_EMBED,
        outside="its ids do not reach (the embedding would be id -1)",
        end=True,
    ),
    _since(
        *(Eagle3, "sglang.minimax_m3-0.5.22", "0.5.18 to 0.5.22", ("minimax_m3",)),
        "srt/models/minimax_m3.py: set_eagle3_layers_to_capture and the loop",
    ),
    _since(
        *(Never, "sglang.minimax_m3-0.5.17", "0.5.16 to 0.5.17", ("minimax_m3",)),
        "srt/models/minimax_m3.py: set_eagle3_layers_to_capture and the loop",
        "Nothing can be captured: the setter and the loop do not fit together.",
        why=_NOTHING,
    ),
    _since(
        *(LaterDefault, "sglang.minimax_m3_vl", "0.5.23", ("minimax_m3_vl",)),
        "srt/models/minimax_m3_vl.py:246-270,309",
        "The embedding cannot be captured; without ids it captures post.2, post.(n//2), post.(n-3), "
        f"where every other model captures post.1, post.(n//2-1), post.(n-4). {PIPELINE}",
        outside="its ids do not reach (the embedding would be id -1)",
        end=True,
    ),
    _since(
        *(LaterDefault, "sglang.minimax_m3_vl-0.5.22", "0.5.18 to 0.5.22", ("minimax_m3_vl",)),
        "srt/models/minimax_m3_vl.py: set_eagle3_layers_to_capture",
        f"{_BOTH_ENDS} Without ids it captures one layer deeper than every other model.",
    ),
    # Up to 0.5.10.
    _since(
        *(Eagle3, "sglang.llama-0.5.10", "0.5.9 to 0.5.10"),
        (*_LLAMA, *_SINGLE, *_GATHERING, *_DEEPSEEK, "glm4_moe_lite", "gpt_oss", "minimax_m2"),
        "srt/model_executor/cuda_graph_runner.py:648; models/llama.py (hidden_states + residual)",
        _GRAPHS,
        graphs_take_default=True,
        embedding=False,
    ),
    _since(
        *(Eagle3, "sglang.kimi_k25-0.5.10", "0.5.10", ("kimi_k25",)),
        "srt/models/kimi_k25.py; deepseek_v2.py; model_executor/cuda_graph_runner.py:648",
        _GRAPHS,
        graphs_take_default=True,
        embedding=False,
    ),
    _since(
        *(Eagle3, "sglang.qwen2-0.5.10", "0.5.9 to 0.5.10", _QWEN2),
        "srt/model_executor/cuda_graph_runner.py:648; models/qwen2.py",
        _GRAPHS,
        graphs_take_default=True,
    ),
    _since(
        *(Eagle3, "sglang.sarvam_moe-0.5.10", "0.5.10", ("sarvam_moe",)),
        "srt/model_executor/cuda_graph_runner.py:648; models/sarvam_moe.py; bailing_moe.py",
        _GRAPHS,
        graphs_take_default=True,
    ),
    _since(
        *(Eagle3, "sglang.qwen3_moe-0.5.10", "0.5.9 to 0.5.10", _MARKED),
        "srt/model_executor/cuda_graph_runner.py:648; models/qwen2_moe.py",
        _GRAPHS,
        graphs_take_default=True,
        memory="marks",
    ),
    # Nothing.
    _since(
        *(Never, "sglang.many_streams", "0.5.20 to 0.5.23", ("qwen4_exp",)),
        "srt/models/qwen4_exp.py:2152-2173 (returns hidden_states, hc_hidden_states)",
        "Nothing is expressible: the model carries several streams.",
        why=_STREAMS,
    ),
    _since(
        *(Never, "sglang.none", "0.5.9 to 0.5.23", ()),
        "srt/model_executor/model_runner_components/attention_backend_setup.py:55-61",
        "No ids mean anything: it has no EAGLE-3 capture for a model type that no other convention names.",
        why=_NO_SETTER,
    ),
)
