"""Every causal language model registered in transformers, shrunk, against the anatomy plugin.

    python benchmarks/families.py [MODEL_TYPE ...] [--json FILE]

prints one line per ``model_type``:

* ``ok``: every boundary, the final norm and the logits equal a run by hand;
* ``ok, gap``: the same, but the model does more between stream and logits than a scaled head (reason shown);
* ``refused``: an explicit `BindError` (reason shown);
* ``WRONG``: the anatomy was found and is not what it claims; the exit code is then 1;
* ``not built``: the config could not be shrunk here; ``not run``: the model does not run on token ids alone.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from capture_hooks_transformers.provider import TransformersAnatomy
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from capture_hooks.errors import BindError
from capture_hooks.testing.anatomy_check import check_anatomy
from capture_hooks.testing.tiny import randomise

LAYERS = 4
# Small value <- names of fields; a field is set only where the family's default config has it as a number.
_SMALL: list[tuple[int, str]] = [
    (128, "vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size d_model n_embd word_embed_proj_dim emb_dim embedding_size lru_width"),
    (48, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff dim_ff ffn_hidden_size"),
    (48, "expert_ffn_hidden_size intermediate_size_mlp feed_forward_size"),
    (16, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (16, "shared_intermediate_size shared_expert_ffn q_lora_rank kv_lora_rank index_head_dim index_topk"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth"),
    (LAYERS, "num_decoder_layers num_encoder_layers num_global_layers"),
    (4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    (4, "linear_num_value_heads swa_num_attention_heads index_n_heads"),
    (2, "num_key_value_heads n_head_kv num_kv_heads linear_num_key_heads swa_num_key_value_heads"),
    (8, "head_dim global_head_dim attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv"),
    (8, "linear_key_head_dim linear_value_head_dim kv_channels swa_head_dim swa_v_head_dim"),
    (8, "state_size mamba_d_state ssm_state_size"),
    (8, "sliding_window attention_window_size window_size local_window_size"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k num_selected_experts moe_k"),
    (1, "n_group topk_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace"),
    (1, "num_nextn_predict_layers bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (2, "eos_token_id"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length"),
]
SMALL = {name: value for value, names in _SMALL for name in names.split()}

_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What the rule above cannot know about some families.
_SPECIAL: list[tuple[str, dict[str, Any]]] = [
    ("axk1 axk2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text", {"num_key_value_heads": 4}),
    ("glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 sarvam_mla youtu", {"num_key_value_heads": 4}),
    (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert",
        {"is_decoder": True},
    ),
    (
        "rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl",
        {"is_decoder": True},
    ),
    ("hunyuan_v1_dense hunyuan_v1_moe ministral nemotron", {"head_dim": 8, "num_key_value_heads": 2}),
    ("gptj codegen", {"rotary_dim": 4}),
    ("bamba granitemoehybrid", _MAMBA2),
    ("bailing_hybrid", {"num_group": 1, "topk_group": 1, "n_group": 1}),
    ("cohere_compass_text", {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}),
    (
        "dbrx",
        {
            "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    ("deepseek_v2", {"num_key_value_heads": 4, "num_experts_per_tok": 2}),
    ("dots1", {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
    ("dots1", {"num_key_value_heads": 2, "num_experts_per_tok": 2}),
    ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64}),
    ("gemma3n_text", {"num_kv_shared_layers": 0}),
    ("granite", {"logits_scaling": 6.0}),
    ("granitemoe", {"logits_scaling": 8.0}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 2}),
    ("mamba2", {"num_heads": 8, "head_dim": 8, "expand": 2}),
    ("qwen4_exp qwen4_exp_text", {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}),
    ("qwen4_exp qwen4_exp_text", {"indexer_budget": 4, "indexer_compress_ratio": 2}),
    ("reformer", {"is_decoder": True, "axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 16)}),
    ("xmod", {"is_decoder": True, "default_language": "en_XX"}),
    ("zamba", {"num_hidden_layers": 8, "layer_types": (["mamba"] * 2 + ["hybrid"] + ["mamba"]) * 2}),
    ("zaya", {"num_experts_per_tok": 1}),
]
SPECIAL: dict[str, dict[str, Any]] = {}
for _names, _fields in _SPECIAL:
    for _name in _names.split():
        SPECIAL[_name] = {**SPECIAL.get(_name, {}), **_fields}
# transformers leaves the embedding out of these families' hidden_states: entry 0 is boundary 1.
FIRST_HIDDEN_STATE = dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv"), 1)
# Their layers hand something else to the next beside the stream (here: the router's own state).
SIDE_STATE = {"zaya"}


def shrink(config_class: type, given: dict[str, Any]) -> Any:
    """A small config of that class: known fields replaced, lists cut to the layer count."""
    default = config_class()
    fields = {
        k: v for k, v in vars(default).items() if not isinstance(getattr(config_class, k, None), property)
    }
    small: dict[str, Any] = {}
    depth = getattr(default, "num_hidden_layers", None)
    for name, value in fields.items():
        if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[name] = SMALL[name]
        elif isinstance(value, list) and depth is not None and len(value) == depth:
            small[name] = value[:LAYERS]
        elif isinstance(value, transformers.PretrainedConfig):
            inner = given.pop(name, {})
            small[name] = type(value)(**inner) if inner else shrink(type(value), {})
    return config_class(**{**small, **given})


def examine(model_type: str) -> tuple[str, str]:
    """Verdict and detail for one family."""
    try:
        torch.manual_seed(0)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
        config_class = (
            model_class.config_class if model_type not in ("gemma3",) else CONFIG_MAPPING[model_type]
        )
        model = model_class._from_config(shrink(config_class, dict(SPECIAL.get(model_type, {}))))
        randomise(model)
        model.eval()
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        anatomy = TransformersAnatomy().describe(model)
    except BindError as error:
        return "refused", str(error)
    ids = torch.randint(3, 90, (2, 9))

    def run() -> Any:
        return model(input_ids=ids, use_cache=False, output_hidden_states=True, return_dict=True)

    try:
        with torch.no_grad():
            assert torch.isfinite(run().logits).all(), "logits are not finite"
    except Exception as error:
        return "not run", f"{type(error).__name__}: {error}"
    try:
        check_anatomy(
            anatomy, run, FIRST_HIDDEN_STATE.get(model_type, 0), complete=model_type not in SIDE_STATE
        )
    except AssertionError as error:
        return "WRONG", str(error)
    norm = type(anatomy.final_norm).__name__ if anatomy.final_norm is not None else "no final norm"
    detail = f"{anatomy.n_layers} × {anatomy.layer_names[0]}, {anatomy.final_norm_name} {norm}"
    if anatomy.logit_scale != 1 or anatomy.logit_softcap is not None:
        detail += f", scale {anatomy.logit_scale:.6g}, soft cap {anatomy.logit_softcap}"
    return ("ok", detail) if anatomy.readout_gap is None else ("ok, gap", f"{detail}; {anatomy.readout_gap}")


def main() -> int:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]))
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for model_type in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        verdict, detail = examine(model_type)
        rows.append((model_type, verdict, detail))
        print(f"{model_type:28} {verdict:10} {' '.join(detail.split())[:300]}", flush=True)
    counts = collections.Counter(verdict for _, verdict, _ in rows)
    print(
        f"\ntransformers {transformers.__version__}: "
        + ", ".join(f"{n} {v}" for v, n in counts.most_common())
    )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
