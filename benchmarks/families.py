"""Every causal language model registered in transformers, shrunk: anatomy, decoding, ragged batches.

    python benchmarks/families.py [MODEL_TYPE ...] [--write] [--json FILE]

prints one line per ``model_type``, with a verdict of each part:

* anatomy: every boundary, the final norm and the logits against a run by hand; with ``gap`` the model does
  more between stream and logits than a scaled head;
* decoding: greedy speculative decoding against `model.generate`, prompt and answer crossing every window and
  limit of the config (`families_run.decodes`);
* batches: a dump of ragged sequences, and capture while training, against each sequence alone
  (`families_run.dumps`);
* the last two again under LongRoPE and under a dynamic RoPE, where the family has a RoPE to scale.

``ok``; ``refused``: an explicit error of ours (reason shown); ``WRONG`` or ``CRASH``: the exit code is then
1; ``not built``: the config could not be shrunk here; ``not run``: it does not run on token ids alone.
"""

from __future__ import annotations

import argparse
import collections
import copy
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from capture_hooks_transformers.provider import TransformersAnatomy
from families_run import decodes, dumps
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from capture_hooks.errors import BindError
from capture_hooks.testing.anatomy_check import check_anatomy
from capture_hooks.testing.tiny import randomise

DOCUMENT = Path(__file__).parents[1] / "docs" / "families.md"
PARTS = ("anatomy", "decoding", "batches", "longrope", "dynamic")
BAD = ("WRONG", "CRASH")
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
    (4, "linear_num_value_heads swa_num_attention_heads"),
    (2, "num_key_value_heads n_head_kv num_kv_heads linear_num_key_heads swa_num_key_value_heads"),
    (8, "head_dim global_head_dim attention_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv"),
    (64, "index_n_heads"),  # few of them tie, and ties are broken by the shape of a batch
    (8, "linear_key_head_dim linear_value_head_dim kv_channels swa_head_dim swa_v_head_dim"),
    (8, "state_size mamba_d_state ssm_state_size"),
    (8, "sliding_window attention_window_size window_size local_window_size sliding_window_size"),
    (8, "attention_chunk_size chunk_size mamba_chunk_size keep_window_size local_attention floor_scale"),
    (8, "log_scaling_n_floor"),
    (4, "block_size index_block_size"),
    (24, "original_max_position_embeddings"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_top_k num_selected_experts moe_k"),
    (1, "n_group topk_group n_groups mamba_n_groups mamba_ngroups first_k_dense_replace"),
    (1, "num_nextn_predict_layers bos_token_id decoder_start_token_id"),
    (0, "pad_token_id"),
    (2, "eos_token_id"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length context_length"),
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


def build(model_type: str, scaling: str | None = None) -> Any:
    """A small random model of that family; None where it has no RoPE to scale."""
    torch.manual_seed(1)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
    config_class = model_class.config_class if model_type not in ("gemma3",) else CONFIG_MAPPING[model_type]
    config = shrink(config_class, dict(SPECIAL.get(model_type, {})))
    if scaling is not None and not scale_rope(config, scaling):
        return None
    model = model_class._from_config(config)
    randomise(model)
    return model.eval()


def scale_rope(config: Any, scaling: str) -> bool:
    """Give every RoPE of a config the scaling, with its switch at 24 positions; False where there is none."""
    text = config.get_text_config(decoder=True)
    text.allow_global_per_layer_attribute_access = True
    settings = getattr(text, "rope_parameters", None)
    if not settings:
        return False
    width = getattr(text, "qk_rope_head_dim", None) or getattr(text, "head_dim", None)
    width = width or text.hidden_size // text.num_attention_heads

    def scaled(old: dict[str, Any]) -> dict[str, Any]:
        pairs = int(width * old.get("partial_rotary_factor", 1.0)) // 2
        new = {**old, "rope_type": scaling, "factor": 4.0}
        if scaling == "longrope":
            new |= {"original_max_position_embeddings": SMALL["original_max_position_embeddings"]}
            new |= {"short_factor": [1 + k / 10 for k in range(pairs)]}
            new |= {"long_factor": [3.0 + k for k in range(pairs)]}
        return new

    nested = any(isinstance(value, dict) for value in settings.values())
    text.rope_parameters = (
        {kind: value and scaled(value) for kind, value in settings.items()} if nested else scaled(settings)
    )
    if scaling == "dynamic":
        text.max_position_embeddings = SMALL["original_max_position_embeddings"]
    return True


def examine(model_type: str) -> dict[str, tuple[str, str]]:
    """Verdict and detail of each part for one family."""
    try:
        model = build(model_type)
    except Exception as error:
        return {"anatomy": ("not built", f"{type(error).__name__}: {error}")}
    rows = {"anatomy": examine_anatomy(model_type, model)}
    if not rows["anatomy"][0].startswith("ok"):
        return rows
    rows["decoding"], rows["batches"] = run(model)
    for scaling in ("longrope", "dynamic"):
        try:
            scaled = build(model_type, scaling)
            if scaled is None:
                continue
            scaled(input_ids=torch.zeros(1, 2, dtype=torch.long))
        except Exception as error:  # transformers' own code for a RoPE that the family never had
            rows[scaling] = "not built", f"{type(error).__name__}: {error}"
            continue
        both = run(scaled)
        rows[scaling] = (
            " / ".join(dict.fromkeys(verdict for verdict, _ in both)),
            "; ".join(detail for _, detail in both),
        )
    return rows


def run(model: Any) -> tuple[tuple[str, str], tuple[str, str]]:
    """`decodes` and `dumps`."""
    anatomy, fresh = TransformersAnatomy().describe(model), copy.deepcopy(model)
    return decodes(model, anatomy, fresh), dumps(model, anatomy, fresh)


def examine_anatomy(model_type: str, model: Any) -> tuple[str, str]:
    """Verdict and detail of `check_anatomy`."""
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
    parser.add_argument("--json", type=Path, help="rows kept there; those already in it are not run again")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {DOCUMENT.name}")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rows: dict[str, dict[str, tuple[str, str]]] = {}
    for model_type in options.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[model_type] = row = kept.get(model_type) or examine(model_type)
        print(model_type, *(f"{part}: {row[part][0]}" for part in PARTS if part in row), sep="  ", flush=True)
        for part, (verdict, detail) in row.items():
            if verdict != "ok":
                print(f"    {part}: {' '.join(detail.split())[:400]}", flush=True)
        if options.json:
            options.json.write_text(json.dumps({**kept, **rows}, indent=1, ensure_ascii=False) + "\n")
    print("\n".join(counts(rows)))
    if options.write:
        DOCUMENT.write_text(table(rows))
    return int(any(bad in verdict for row in rows.values() for verdict, _ in row.values() for bad in BAD))


def counts(rows: dict[str, dict[str, tuple[str, str]]]) -> list[str]:
    """One line for each part."""
    lines = []
    for part in PARTS:
        found = collections.Counter(row[part][0] for row in rows.values() if part in row)
        lines.append(f"{part}: " + ", ".join(f"{n} {verdict}" for verdict, n in found.most_common()))
    return lines


def table(rows: dict[str, dict[str, tuple[str, str]]]) -> str:
    """The document's text."""
    missing = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(rows))
    lines = [
        "# transformers' language models, each one tried",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on a CPU, tiny random "
        "models of all causal language models that transformers registers. Anatomy: every state against a "
        "run by hand. Decoding: greedy speculative decoding against `model.generate`, over windows of 8 and "
        "limits of 24 positions. Batches: a dump of ragged sequences, and capture while training, against "
        "each sequence alone. The last columns repeat both under LongRoPE and dynamic RoPE; – where there "
        "is no RoPE to scale, or no anatomy.",
        "",
        "Made by `python benchmarks/families.py --write`.",
        "",
        *(f"* {line}" for line in counts(rows)),
        *([f"* not run: {', '.join(missing)}"] if missing else []),
        "",
        "| family | anatomy | decoding | batches | LongRoPE | dynamic RoPE |",
        "|---|---|---|---|---|---|",
    ]
    for family, row in rows.items():
        lines.append(f"| {family} | " + " | ".join(row.get(part, ("–", ""))[0] for part in PARTS) + " |")
    lines += ["", "## What is not ok, and why", "", "| family | part | | why |", "|---|---|---|---|"]
    for family, row in rows.items():
        for part, (verdict, detail) in row.items():
            if verdict != "ok" and part in PARTS[:3]:
                why = " ".join(detail.split()).replace("|", "/")[:300]
                lines.append(f"| {family} | {part} | {verdict} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
