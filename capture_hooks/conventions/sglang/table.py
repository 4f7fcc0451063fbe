"""What the tables of SGLang's families share: how a row is written, groups of families, and limits."""

from __future__ import annotations

from typing import Any, Final

from ..contract import Convention

# Families that changed together.
LLAMA: Final = ("internlm3", "iquestcoder", "llama", "ministral3", "mistral", "phi3")
SINGLE: Final = ("apertus", "exaone_moe")
GATHERING: Final = ("glm4_moe", "llama4", "llama4_text", "longcat_flash")
QWEN2: Final = ("bailing_moe", "bailing_moe_v2", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3")
MARKED: Final = ("qwen2_moe", "qwen3_moe", "qwen3_next")
DEEPSEEK: Final = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2")
QWEN3_5: Final = ("qwen3_5", "qwen3_5_moe")
QWEN3_5_TEXT: Final = ("qwen3_5_moe_text", "qwen3_5_text")
INTERN_S2: Final = ("intern_s2_preview", "interns2_mobius")
QWEN3_VL: Final = ("qwen3_vl", "qwen3_vl_text")
QWEN3_VL_MOE: Final = ("qwen3_vl_moe", "qwen3_vl_moe_text")

PIPELINE: Final = "Under pipeline parallelism only layers of the last rank are captured."
NO_EMBED: Final = f"The embedding cannot be captured. {PIPELINE}"
BOTH_ENDS: Final = f"Neither the embedding nor the output of the last layer can be captured. {PIPELINE}"
DEEPSTACK: Final = (
    f"{BOTH_ENDS} Where a prompt has images, what DeepStack adds after a layer is in the state."
)
NO_DEEPSTACK: Final = (
    f"{BOTH_ENDS} Where a prompt has images, what DeepStack adds after a layer is not in the state."
)
FIRST_ONE: Final = (
    "The output of the last layer cannot be captured, and post.0 cannot come first: its id 0 would have "
    f"to be written as pre.1, and a list that starts with 1 is read as outputs. {PIPELINE}"
)


def since(
    rule: type[Convention],
    name: str,
    versions: str,
    families: tuple[str, ...],
    source: str,
    limits: str = BOTH_ENDS,
    **differs: Any,
) -> Convention:
    """One rule in some versions for some families; ``differs`` are attributes of the rule's own."""
    stated = {"name": name, "versions": versions, "families": families, "source": source, "limits": limits}
    made: Convention = type(rule.__name__, (rule,), {"__doc__": rule.__doc__, **differs, **stated})()
    return made
