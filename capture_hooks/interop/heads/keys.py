"""Every key of a head's config: one that is mapped, one that no reader of a head uses, or one to carry."""

from __future__ import annotations

from typing import Final

from .draft import CONVERSION

#: Keys of the draft itself that every layout has, under the same name.
SIZES: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
    "mlp_bias",
    "model_type",
)
#: Named so that a file says them; a server takes the target's.
TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
ROPE: Final = ("rope_parameters", "rope_scaling", "rope_theta")
#: Keys that each layout's reader turns into something else.
MAPPED: Final = frozenset(
    {
        *SIZES,
        *TOKENS,
        *ROPE,
        "architectures",
        "draft_vocab_size",
        "target_hidden_size",
        "num_aux_hidden_states",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "use_aux_norm",
        "norm_output",
        "use_aux_hidden_state",
        "eagle_aux_hidden_state_layer_ids",
        "eagle_config",
        "transformer_layer_config",
        "speculators_model_type",
        "speculators_version",
        "capture",
        CONVERSION,
    }
)
#: Keys that one layout alone has and another's readers must not find.
OWN: Final = {
    "speculators": ("speculators_config", "embed_requires_grad"),
    "capture-hooks": ("eagle3_training",),
}
#: ModelOpt's own keys of ``eagle_config`` (``export/plugins/hf_spec_configs.py``), and the values with which
#: a head computes what every reader takes it to compute.
MODELOPT: Final = {
    "use_input_layernorm_in_first_layer": (None, True),
    "use_mtp_layernorm": (None, False),
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 0, 1),
    "parallel_draft_heads_num_layers": None,
}
EAGLE_MAPPED: Final = frozenset(
    {
        "eagle_aux_hidden_state_layer_ids",
        "use_aux_hidden_state",
        "norm_before_fc",
        "norm_output",
        "use_last_layernorm",
        *MODELOPT,
    }
)

_BOOKKEEPING = "bookkeeping of transformers"
_GENERATION = "a setting of generate(); a server takes the target's"
_TRAINING = "used in training alone"
#: Keys without a meaning for any reader of a head, and why.
IRRELEVANT: Final = {
    **dict.fromkeys(
        (
            "transformers_version",
            "_name_or_path",
            "name_or_path",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "auto_map",
            "id2label",
            "label2id",
            "problem_type",
            "return_dict",
            "output_attentions",
            "output_hidden_states",
            "torchscript",
            "use_bfloat16",
            "pruned_heads",
            "chunk_size_feed_forward",
            "is_decoder",
            "is_encoder_decoder",
            "add_cross_attention",
            "cross_attention_hidden_size",
            "tie_encoder_decoder",
            "tf_legacy_loss",
            "finetuning_task",
            "task_specific_params",
            "tokenizer_class",
            "prefix",
            "use_cache",
        ),
        _BOOKKEEPING,
    ),
    **dict.fromkeys(
        (
            "max_length",
            "min_length",
            "do_sample",
            "early_stopping",
            "num_beams",
            "num_beam_groups",
            "num_return_sequences",
            "diversity_penalty",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "bad_words_ids",
            "suppress_tokens",
            "begin_suppress_tokens",
            "exponential_decay_length_penalty",
            "output_scores",
            "return_dict_in_generate",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "decoder_start_token_id",
            "sep_token_id",
            "remove_invalid_values",
        ),
        _GENERATION,
    ),
    **dict.fromkeys(("initializer_range", "attention_dropout"), _TRAINING),
    "pretraining_tp": "how another model's training was split",
}
#: The same for tensors, by the end of their canonical name.
IRRELEVANT_TENSORS: Final = {
    "rotary_emb.inv_freq": "computed from the RoPE settings",
    "verifier_norm.weight": "a copy of the target's final norm",
    "verifier_lm_head.weight": "a copy of the target's lm_head",
}
