"""What engines do with the rest of a head's directory: flags, architectures, weights.  Claims, as data.

Each claim names the library, the versions it was established in, the draft class it is about and the file
and line that show it; `tests/interop/test_engine_behaviour.py` runs the libraries' own draft classes and
compares.  What the layer ids mean is not here but in `capture_hooks.conventions`, and what a head that we
wrote ourselves needs is in `capture_hooks.heads.engines`, which must not contradict this table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from ...conventions.contract import Rank

#: The norm flags of EAGLE-3 and 3.1 heads, and whether the head eats concatenated states at all.
FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")
#: *honours* it; *ignores* it, taking ``absent`` whatever the file says; *other*: reads it as something else.
Treatment = Literal["honours", "ignores", "other"]
#: Draft classes: *llama*, *qwen3*, and *mla* (DeepSeek's attention).
Draft = Literal["llama", "qwen3", "mla"]

VERSIONS: Final[Mapping[str, str]] = {
    "sglang": "0.5.23",
    "vllm": "0.32.0",
    "specforge": "0.2.0",
    "speculators": "0.9.0",
    "modelopt": "0.47.0",
}
#: The day on which claims were taken from source that no test runs.
READ_ON: Final = "2026-11-30"
#: Engines that serve heads; the others train them.
SERVERS: Final = ("sglang", "vllm")

_SG = "srt/models/llama_eagle3.py"
_SG_MLA = "srt/models/kimi_k25_eagle3.py"
_VL = "model_executor/models/llama_eagle3.py"
_VL_QWEN = "model_executor/models/qwen3_eagle3.py"
_VL_MLA = "model_executor/models/deepseek_eagle3.py"
_SF = "specforge/modeling/draft/llama3_eagle.py"


def cite(engine: str, place: str) -> str:
    """A source as findings show it: library, version, file and line."""
    return f"{engine} {VERSIONS[engine]}: {place}"


@dataclass(frozen=True, slots=True)
class FlagRule:
    """How one draft class of one library treats one flag.

    Attributes:
        keys: where it looks, in its order; a key elsewhere in the file is not seen.
        absent: what it takes where it finds none (or always, where it ignores the flag).
        rank: whether our tests run the class, or the claim was taken from its source.
    """

    engine: str
    draft: Draft
    flag: str
    does: Treatment
    absent: bool
    keys: tuple[str, ...]
    source: str
    rank: Rank

    def value(self, config: Mapping[str, Any]) -> bool:
        """What it takes from a config: the first key that is there counts, and null is false then.

        Of ``fc_norm``'s two keys each is enough (``getattr(...) or getattr(...)``).
        """
        if self.does == "ignores":
            return self.absent
        there = [bool(lookup(config, key)) for key in self.keys if _is_there(config, key)]
        if self.flag == "fc_norm":
            return any(there)
        return there[0] if there else self.absent


def _rules(
    engine: str, draft: Draft, rows: Mapping[str, tuple[Treatment, bool, tuple[str, ...], str]]
) -> Iterator[FlagRule]:
    for flag, (does, absent, keys, place) in rows.items():
        rank: Rank = "read" if flag == "use_aux_hidden_state" else "verified"
        said = cite(engine, place) + ("" if rank == "verified" else f" (read {READ_ON}, not run)")
        yield FlagRule(engine, draft, flag, does, absent, keys, said, rank)


_IN_EAGLE_CONFIG: Final = ("eagle_config.norm_before_fc", "norm_before_fc")
_AUX: Final = ("eagle_config.use_aux_hidden_state",)
_SG_AUX: Final = "srt/model_executor/model_runner_components/spec_aux_hidden_state.py:187-196"

RULES: Final[tuple[FlagRule, ...]] = (
    *_rules(
        "sglang",
        "llama",
        {
            "norm_before_residual": ("ignores", False, (), f"{_SG}:97-102"),
            "norm_before_fc": ("honours", False, _IN_EAGLE_CONFIG, f"{_SG}:173-182,239-240"),
            "fc_norm": ("honours", False, ("fc_norm", "use_aux_norm"), f"{_SG}:185-196,241-246"),
            "norm_output": ("honours", False, ("norm_output",), f"{_SG}:207,268"),
            "use_aux_hidden_state": ("honours", True, _AUX, _SG_AUX),
        },
    ),
    *_rules(
        "sglang",
        "mla",
        {
            "norm_before_residual": ("ignores", False, (), f"{_SG_MLA}:159-162"),
            "norm_before_fc": ("ignores", False, (), f"{_SG_MLA}:285-294 (it has no input_norm)"),
            "fc_norm": ("honours", False, ("fc_norm", "use_aux_norm"), f"{_SG_MLA}:230-241,287-292"),
            "norm_output": ("honours", False, ("norm_output",), f"{_SG_MLA}:255,311"),
            "use_aux_hidden_state": ("honours", True, _AUX, _SG_AUX),
        },
    ),
    *_rules(
        "vllm",
        "llama",
        {
            "norm_before_residual": ("honours", False, ("norm_before_residual",), f"{_VL}:101-127"),
            "norm_before_fc": ("honours", False, _IN_EAGLE_CONFIG, f"{_VL}:184-188,405-407"),
            "fc_norm": ("honours", False, ("fc_norm",), f"{_VL}:231-240,411-416"),
            "norm_output": ("honours", False, ("norm_output",), f"{_VL}:252,286"),
            "use_aux_hidden_state": ("honours", True, _AUX, f"{_VL}:180-183,401"),
        },
    ),
    *_rules(
        "vllm",
        "qwen3",
        {
            "norm_before_residual": ("honours", False, ("norm_before_residual",), f"{_VL_QWEN}:85-107"),
            "norm_before_fc": ("honours", False, _IN_EAGLE_CONFIG, f"{_VL_QWEN}:175-179,384"),
            "fc_norm": ("honours", False, ("fc_norm",), f"{_VL_QWEN}:224-233,389"),
            "norm_output": ("honours", False, ("norm_output",), f"{_VL_QWEN}:245,276"),
            "use_aux_hidden_state": ("honours", True, _AUX, f"{_VL_QWEN}:171-174,380"),
        },
    ),
    *_rules(
        "vllm",
        "mla",
        {
            "norm_before_residual": ("honours", False, ("norm_before_residual",), f"{_VL_MLA}:101-123"),
            "norm_before_fc": ("ignores", False, (), f"{_VL_MLA}:355-370 (it has no input_norm)"),
            "fc_norm": ("honours", False, ("fc_norm",), f"{_VL_MLA}:211-220,362"),
            "norm_output": ("honours", False, ("norm_output",), f"{_VL_MLA}:222,254"),
            "use_aux_hidden_state": ("ignores", True, (), f"{_VL_MLA}:355-370 (fc is always applied)"),
        },
    ),
    *_rules(
        "specforge",
        "llama",
        {
            "norm_before_residual": ("ignores", False, (), f"{_SF}:1626-1629"),
            "norm_before_fc": ("ignores", False, (), f"{_SF}:1758-1766 (it has no input_norm)"),
            "fc_norm": ("honours", False, ("fc_norm",), f"{_SF}:1679-1687"),
            "norm_output": ("other", True, ("norm_output",), f"{_SF}:1690,1772-1777"),
            "use_aux_hidden_state": ("ignores", True, (), f"{_SF}:1674 (fc takes three states)"),
        },
    ),
)

#: Architecture names that an engine serves as an EAGLE-3 head, and the draft class each gets.
#: vLLM puts ``Eagle3`` before any other name (transformers_utils/configs/eagle.py:60-69).
ARCHITECTURES: Final[Mapping[str, Mapping[str, Draft]]] = {
    "sglang": {"LlamaForCausalLMEagle3": "llama", "Eagle3DeepseekV2ForCausalLM": "mla"},
    "vllm": {
        "LlamaForCausalLMEagle3": "llama",
        "Eagle3LlamaForCausalLM": "llama",
        "LlamaForCausalLM": "llama",
        "Eagle3MiniMaxM2ForCausalLM": "llama",
        "MiniMaxM2ForCausalLM": "llama",
        "Eagle3Qwen2_5vlForCausalLM": "llama",
        "Eagle3Qwen3vlForCausalLM": "llama",
        "Eagle3Qwen3ForCausalLM": "qwen3",
        "Qwen3ForCausalLM": "qwen3",
        "Eagle3DeepseekV2ForCausalLM": "mla",
        "DeepseekV2ForCausalLM": "mla",
        "Eagle3DeepseekV3ForCausalLM": "mla",
        "DeepseekV3ForCausalLM": "mla",
    },
    "specforge": {"LlamaForCausalLMEagle3": "llama"},
}
#: Where each engine looks architectures up.
ARCHITECTURES_FROM: Final[Mapping[str, str]] = {
    "sglang": cite("sglang", f"EntryClass in {_SG}:387 and {_SG_MLA}:523"),
    "vllm": cite("vllm", "model_executor/models/registry.py:658-673"),
    "specforge": cite("specforge", "specforge/modeling/draft/registry.py"),
}
#: ``model_type`` of raw heads that vLLM takes for DeepSeek's own MTP layer, whatever their architecture; it
#: then finds no such EAGLE-3 class and stops.
MTP_TYPES: Final = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
MTP_FROM: Final = cite("vllm", "config/speculative.py:679-694")
#: ``transformer_layer_config.model_type`` of a speculators head that vLLM serves.
SPECULATORS_TYPES: Final[Mapping[str, Draft]] = {"llama": "llama", "qwen3": "qwen3"}
SPECULATORS_FROM: Final = cite(
    "vllm", "transformers_utils/configs/speculators/algos.py:16-54, transformers_utils/config.py:319"
)


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value under a dotted key; None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _is_there(config: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key is in the file, null included."""
    holder, _, name = key.rpartition(".")
    held = lookup(config, holder) if holder else config
    return isinstance(held, Mapping) and name in held


def flag_rule(engine: str, draft: Draft, flag: str) -> FlagRule | None:
    """How an engine's draft class treats a flag; None where that engine has no such class."""
    found = (rule for rule in RULES if (rule.engine, rule.draft, rule.flag) == (engine, draft, flag))
    return next(found, None)


def draft_of(engine: str, architectures: Any) -> Draft | None:
    """The draft class that an engine makes of ``config["architectures"]``; None where it makes none.

    A name outside a list is none: both servers look its letters up one by one (vLLM 0.32.0
    ``transformers_utils/configs/eagle.py:60-69``, SGLang 0.5.23 ``srt/model_loader/utils.py:224-231``).
    """
    names = architectures if isinstance(architectures, list) else []
    known = ARCHITECTURES[engine]
    return next((known[name] for name in names if isinstance(name, str) and name in known), None)


def fc_inputs(engine: str, draft: Draft, config: Mapping[str, Any]) -> tuple[int, str]:
    """For how many states an engine's draft class builds ``fc``, and where that is in its source.

    It does not ask the capture side: a file whose keys disagree gives ``fc`` another width than it is fed.
    """
    nested = _length(lookup(config, "eagle_config.eagle_aux_hidden_state_layer_ids"))
    top = _length(config.get("eagle_aux_hidden_state_layer_ids"))
    said = config.get("num_aux_hidden_states")
    said = said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None
    if engine == "specforge":
        return 3, cite(engine, f"{_SF}:1674")
    if engine == "sglang" and draft == "mla":
        return nested or top or 3, cite(engine, f"{_SG_MLA}:48-60,211")
    if engine == "sglang":
        return said or nested or 3, cite(engine, f"{_SG}:157-161")
    if draft == "qwen3":
        layers = config.get("num_aux_layers")
        layers = layers if isinstance(layers, int) and not isinstance(layers, bool) and layers > 0 else None
        return layers or said or top or nested or 3, cite(engine, f"{_VL_QWEN}:202-210")
    return said or nested or 3, cite(engine, f"{_VL_MLA}:189-194" if draft == "mla" else f"{_VL}:210-216")


def _length(ids: Any) -> int | None:
    return len(ids) or None if isinstance(ids, list) else None
