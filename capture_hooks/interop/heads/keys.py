"""Every key of a head's config: one that is mapped, one that no reader of a head uses, or one to carry.

Of those that are carried, some reader acts on a few that our head does not compute: the rows of
`capture_hooks.conventions.facts.KEYS`, and what `_found` looks at beside them.  Keys of
other families' decoders (``attention_multiplier``, ``query_pre_attn_scalar``, ...) are not among them: no
reader of ``LlamaForCausalLMEagle3`` computes them.  Our head itself refuses another ``hidden_act`` and
biases; sliding windows are `Draft.window`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ...conventions.facts import KEYS
from ...heads.schema import HeadSchema
from .draft import CONVERSION, Draft

#: Keys that each layout's reader turns into something else, beside those of the schema.
_MAPPED: Final = frozenset(
    {
        "architectures",
        "draft_vocab_size",
        "target_hidden_size",
        "num_aux_hidden_states",
        "dtype",
        "torch_dtype",
        "tie_word_embeddings",
        "eagle_aux_hidden_state_layer_ids",
        "transformer_layer_config",
        "speculators_model_type",
        "speculators_version",
        "capture",
        CONVERSION,
    }
)
#: Keys that one layout alone has and another's readers must not find.
SPECULATORS: Final = ("speculators_config", "embed_requires_grad")
#: ModelOpt's own keys of ``eagle_config`` (``export/plugins/hf_spec_configs.py``), and the values with which
#: a head computes what every reader takes it to compute.
MODELOPT: Final = {
    "use_input_layernorm_in_first_layer": (None, True),
    "use_mtp_layernorm": (None, False),
    "next_layer_regular": (None, True),
    "parallel_draft_step": (None, 0, 1),
    "parallel_draft_heads_num_layers": None,
}

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
#: RoPE types whose frequencies depend neither on the sequence's length nor on the reader.  ``dynamic`` is the
#: plain rotation in transformers up to the original length, and another base at every length in vLLM;
#: ``longrope`` has two sets of factors, and each reader its own rule for when to change.
_FIXED: Final = ("default", "linear", "llama3", "yarn")


def owned(schema: HeadSchema) -> dict[str, tuple[str, ...]]:
    """By layout, the keys that it alone has and another's readers must not find."""
    return {"speculators": SPECULATORS, "capture-hooks": (schema.settings_key,)}


def mapped(schema: HeadSchema) -> frozenset[str]:
    """Keys at the top, and within speculators' section, that are read and written anew."""
    flags = (place.partition(".")[0] for places in schema.places.values() for place in places)
    return _MAPPED | {*schema.layer_keys, *schema.rope_keys, *flags}


def eagle_mapped(schema: HeadSchema) -> frozenset[str]:
    """The same of ``eagle_config``."""
    places = [place for several in schema.places.values() for place in several]
    nested = {place.removeprefix("eagle_config.") for place in places if place.startswith("eagle_config.")}
    return frozenset({"eagle_aux_hidden_state_layer_ids", *nested, *MODELOPT})


def beyond_ours(draft: Draft) -> list[str]:
    """What servers would compute for this config and our head does not, a sentence each."""
    found = [f"{what}, and its draft does not" for what in _found(draft)]
    kind = draft.fields["rope_parameters"]["rope_type"]
    if kind not in _FIXED:
        found.append(f"rope_type is {kind!r}: which frequencies that is depends on the length and the reader")
    return found


def reader_notes(draft: Draft) -> list[str]:
    """Where the readers of a file with this config part, a sentence each."""
    found = [f"{what}; what trained it may not have" for what in _found(draft)]
    if (act := draft.fields["hidden_act"]) != "silu":
        # SGLang llama.py:116, vLLM llama.py:112.
        found.append(f"hidden_act is {act!r}: SGLang and vLLM refuse a draft with anything but silu")
    return found


def _found(draft: Draft) -> Iterator[str]:
    rope = draft.fields["rope_parameters"]
    for within, held in (("", draft.extras), ("rope_parameters", rope)):
        for key in (key for key in KEYS if within in key.within):
            if _changes(value := held.get(key.name), key.harmless):
                yield f"{within}{'.' if within else ''}{key.name} is {_short(value)}: {key.does}"
    # vLLM transformers_utils/config.py:627.
    if (base := draft.extras.get("rotary_emb_base")) is not None and base != rope["rope_theta"]:
        yield f"rotary_emb_base is {base!r}, and rope_theta {rope['rope_theta']!r}: vLLM takes either"
    # SGLang llama.py:329-334 writes it over the settings' own.
    outer, inner = (s.get("original_max_position_embeddings") for s in (draft.extras, rope))
    if rope["rope_type"] != "default" and outer is not None and outer != inner:
        yield (
            f"original_max_position_embeddings is {outer!r}, and {inner!r} in the RoPE settings: "
            "SGLang scales by the former"
        )


def _changes(value: Any, fine: Any) -> bool:
    if value is None:
        return False
    return isinstance(value, bool) != isinstance(fine, bool) or value != fine


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
