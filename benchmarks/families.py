"""Every causal language model registered in transformers, shrunk, against the anatomy plugin.

    python benchmarks/families.py [MODEL_TYPE ...] [--json FILE]

prints one line per ``model_type``:

* ``ok``: every boundary, the final norm and the logits equal a run by hand;
* ``ok, gap``: the same, but the model does more between stream and logits than a scaled head (reason shown);
* ``refused``: an explicit `BindError` (reason shown);
* ``WRONG``: the anatomy was found and is not what it claims; the exit code is then 1;
* ``not built``: the config could not be shrunk or the model does not run by itself here.
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from capture_hooks.errors import BindError
from capture_hooks.testing.anatomy_check import check_anatomy
from capture_hooks.testing.tiny import randomise
from capture_hooks_transformers.provider import TransformersAnatomy

LAYERS = 4
# Field name -> small value; a field is set only where the family's default config has it as a number.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff", "dim_ff", "ffn_hidden_size",
         "expert_ffn_hidden_size", "intermediate_size_mlp", "feed_forward_size"), 48),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
         "shared_intermediate_size", "shared_expert_ffn"), 16),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
         "num_decoder_layers", "num_encoder_layers", "depth", "num_global_layers"), LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "linear_num_value_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "linear_num_key_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "global_head_dim", "attention_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_kv",
         "linear_key_head_dim", "linear_value_head_dim", "kv_channels", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "index_topk"), 16),
    **dict.fromkeys(("index_n_heads",), 4),
    **dict.fromkeys(
        ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "num_selected_experts", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_window_size", "window_size", "local_window_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "context_length"), 256),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 8),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
# What the rule above cannot know about one family.
SPECIAL: dict[str, dict[str, Any]] = {}
for _type in ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
              "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
              "xmod", "reformer"):  # fmt: skip
    SPECIAL[_type] = {"is_decoder": True}


def shrink(config_class: type, given: dict[str, Any]) -> Any:
    """A small config of that class: known fields replaced, lists cut to the layer count."""
    default = config_class()
    fields = {**{k: v for k, v in vars(default).items() if not k.startswith("_")}}
    for short in config_class.attribute_map.values():
        fields.setdefault(short, getattr(default, short, None))
    small: dict[str, Any] = {}
    depth = getattr(default, "num_hidden_layers", None)
    for name, value in fields.items():
        if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            small[name] = SMALL[name]
        elif isinstance(value, list) and depth is not None and len(value) == depth:
            small[name] = value[:LAYERS]
        elif isinstance(value, transformers.PretrainedConfig):
            small[name] = shrink(type(value), given.pop(name, {}))
    return config_class(**{**small, **given})


def examine(model_type: str) -> tuple[str, str]:
    """Verdict and detail for one family."""
    try:
        torch.manual_seed(0)
        config = shrink(CONFIG_MAPPING[model_type], dict(SPECIAL.get(model_type, {})))
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(config)
        randomise(model)
        model.eval()
        ids = torch.randint(3, 90, (2, 9))

        def run() -> Any:
            return model(input_ids=ids, use_cache=False, output_hidden_states=True, return_dict=True)

        with torch.no_grad():
            assert torch.isfinite(run().logits).all(), "logits are not finite"
    except Exception as error:
        return "not built", f"{type(error).__name__}: {error}"
    try:
        anatomy = TransformersAnatomy().describe(model)
    except BindError as error:
        return "refused", str(error)
    try:
        check_anatomy(anatomy, run)
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
    print(f"\ntransformers {transformers.__version__}: " + ", ".join(f"{n} {v}" for v, n in counts.most_common()))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return int(counts["WRONG"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
