"""How to shrink each family's config to a few thousand parameters.  Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCAB: Final = 272  # 256 bytes, 3 special tokens, and some that the tokenizer never gives
HIDDEN: Final = 32
LAYERS: Final = 6  # the fewest for which the EAGLE-3 default layers exist

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: Final[Mapping[str, Any]] = {"num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: a ``model_type`` and the config fields that make it tiny."""

    model_type: str
    settings: Mapping[str, Any]
    outer: Mapping[str, Any] = field(default_factory=dict)  # multimodal: fields of the outer config
    multimodal: bool = False

    def config(self, **overrides: Any) -> PretrainedConfig:
        from transformers import AutoConfig

        text = {**self.settings, **overrides}
        if not self.multimodal:
            return AutoConfig.for_model(self.model_type, **text)
        return AutoConfig.for_model(self.model_type, text_config=text, **self.outer)


def _row(model_type: str, **settings: Any) -> Family:
    return Family(model_type, {**_COMMON, **settings})


def _grouped(model_type: str, **settings: Any) -> Family:
    return _row(model_type, **_GROUPED, **settings)


def _seeing(model_type: str, text_type: str, *, outer: Mapping[str, Any], **settings: Any) -> Family:
    text = {**_COMMON, **_GROUPED, **settings, "model_type": text_type}
    return Family(model_type, text, outer, multimodal=True)


def _longrope(pairs: int) -> dict[str, Any]:
    """LongRoPE over ``pairs`` of channels that switches its frequencies beyond 24 positions."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 24,
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [3.0 + pair for pair in range(pairs)],
    }


_EXPERTS: Final[Mapping[str, Any]] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA: Final[Mapping[str, Any]] = {  # multi-head latent attention
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    **_EXPERTS,
}
_VIT: Final[Mapping[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_QWEN_VIT: Final[Mapping[str, Any]] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
_QWEN25_VIT: Final[Mapping[str, Any]] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}
#: Time, height and width each turn some of a head's four pairs of channels.
_MROPE: Final[Mapping[str, Any]] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_GEMMA4_VIT: Final[Mapping[str, Any]] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 1,
    "position_embedding_size": 64,
}
_QWEN_TOKENS: Final[Mapping[str, Any]] = {
    "image_token_id": 260,
    "video_token_id": 261,
    "vision_start_token_id": 262,
    "vision_end_token_id": 263,
}

FAMILIES: Final[dict[str, Family]] = {
    "llama": _grouped("llama"),
    "gpt2": _row("gpt2"),
    "qwen3": _grouped("qwen3", head_dim=8),
    "gemma2": _grouped("gemma2", head_dim=8, sliding_window=8),
    "bloom": _row("bloom"),
    "cohere": _grouped("cohere", logit_scale=0.0625),
    "deepseek_v2": _row("deepseek_v2", **_MLA),
    "deepseek_v3": _row("deepseek_v3", **_MLA),
    "falcon": _row("falcon", new_decoder_architecture=True, num_kv_heads=2),
    "gemma": _grouped("gemma", head_dim=8),
    "gemma3": _seeing(
        "gemma3",
        "gemma3_text",
        outer={"vision_config": _VIT, "mm_tokens_per_image": 4, "image_token_index": 260},
        head_dim=8,
        sliding_window=8,
    ),
    "gemma4": _seeing(
        "gemma4",
        "gemma4_text",
        outer={"vision_config": _GEMMA4_VIT, "audio_config": None, "image_token_id": 260},
        head_dim=8,
        global_head_dim=8,
        sliding_window=8,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
    ),
    "gemma3_text": _grouped("gemma3_text", head_dim=8, sliding_window=8),
    "gpt_neox": _row("gpt_neox"),
    "gpt_oss": _grouped("gpt_oss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "gptj": _row("gptj", rotary_dim=4),
    "granite": _grouped("granite", logits_scaling=6.0, embedding_multiplier=3.0, residual_multiplier=0.5),
    "llava": _seeing(
        "llava",
        "llama",
        outer={"vision_config": {**_VIT, "model_type": "clip_vision_model"}, "image_token_index": 260},
    ),
    "llama_dynamic": _grouped(
        "llama",
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "llama_longrope": _grouped("llama", rope_parameters=_longrope(4)),
    "mamba": _row("mamba", state_size=8),
    "minicpm3": _row("minicpm3", **_MLA, dim_model_base=8, scale_emb=2.0),
    "mistral": _grouped("mistral", sliding_window=8),
    "mixtral": _grouped("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mpt": _row("mpt"),
    "nanochat": _grouped("nanochat", head_dim=8),
    "olmo": _grouped("olmo"),
    "olmo2": _grouped("olmo2"),
    "opt": _row("opt", ffn_dim=48, word_embed_proj_dim=HIDDEN),
    "opt_350m": _row("opt", ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False),
    "phi": _grouped("phi"),
    "phi3": _grouped("phi3"),
    "phi3_longrope": _grouped(
        "phi3",
        original_max_position_embeddings=24,
        rope_parameters={**_longrope(3), "partial_rotary_factor": 0.75},
    ),
    "qwen2": _grouped("qwen2"),
    "qwen2_5_vl": _seeing(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        outer={"vision_config": _QWEN25_VIT, **_QWEN_TOKENS},
        rope_parameters=_MROPE,
    ),
    "qwen3_moe": _grouped("qwen3_moe", head_dim=8, num_experts=4, **_EXPERTS),
    "qwen3_vl": _seeing(
        "qwen3_vl",
        "qwen3_vl_text",
        outer={"vision_config": _QWEN_VIT, **_QWEN_TOKENS},
        head_dim=8,
        rope_parameters={**_MROPE, "mrope_interleaved": True},
    ),
    "smollm3": _grouped("smollm3"),
    "stablelm": _grouped("stablelm"),
    "starcoder2": _grouped("starcoder2"),
}
