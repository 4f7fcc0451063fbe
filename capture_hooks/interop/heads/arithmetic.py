"""Config keys beyond sizes and flags that change what a Llama-type draft computes, and who computes it so.

Here are the keys that some reader of ``LlamaForCausalLMEagle3`` acts on and our head does not: in SGLang
0.5.23 ``srt/models/llama.py``, ``llama_eagle3.py`` and ``srt/layers/rotary_embedding/factory.py``; in vLLM
0.32.0 ``model_executor/models/llama.py``, ``llama_eagle3.py`` and ``layers/rotary_embedding/__init__.py``.
Keys of other families' decoders (``attention_multiplier``, ``query_pre_attn_scalar``, ...) are not: no reader
of this draft computes them.
``hidden_act``, ``attention_bias`` and ``mlp_bias`` our head itself refuses, sliding windows are in `plain`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from .draft import Draft

#: Keys of the draft's config, the value that changes nothing (beside null), and what another one does.
_KEYS: Final[dict[str, tuple[Any, str]]] = {
    # SGLang llama.py:199; vLLM after transformers has moved it into rope_parameters.
    "partial_rotary_factor": (1, "SGLang and vLLM turn that part of each attention head's channels"),
    # vLLM transformers_utils/config.py:629 takes both for partial_rotary_factor.
    "rotary_pct": (1, "vLLM turns that part of each attention head's channels"),
    "rotary_emb_fraction": (1, "vLLM turns that part of each attention head's channels"),
    # SGLang llama.py:335.
    "rope_is_neox_style": (True, "SGLang turns neighbouring channels together, not the two halves"),
    # SGLang llama.py:339, llama_eagle3.py:166; vLLM llama.py:268.
    "bias": (False, "SGLang and vLLM give the attention's projections biases, SGLang also fc"),
    # vLLM llama.py:280.
    "is_causal": (True, "vLLM attends to later tokens too"),
    # vLLM llama_eagle3.py:328.
    "logit_scale": (1, "vLLM multiplies the logits by it"),
    "quantization_config": (
        {},
        "servers take the weights for quantised ones",
    ),
}
#: The same within ``rope_parameters``.
_ROPE: Final[dict[str, tuple[Any, str]]] = {
    "partial_rotary_factor": _KEYS["partial_rotary_factor"],
    # vLLM rotary_embedding/__init__.py:66,125.
    "rope_dim": (None, "vLLM turns so many of each attention head's channels"),
    "use_fope": (False, "vLLM takes Fourier position embeddings"),
    # SGLang factory.py:324 (YaRN).
    "attn_factor": (1, "SGLang multiplies cosines and sines by it"),
    "extrapolation_factor": (1, "SGLang scales the ramp between the frequencies by it"),
}
#: RoPE types whose frequencies depend neither on the sequence's length nor on the reader.  ``dynamic`` is the
#: plain rotation in transformers up to the original length, and another base at every length in vLLM;
#: ``longrope`` has two sets of factors, and each reader its own rule for when to change.
_FIXED: Final = ("default", "linear", "llama3", "yarn")


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
    for name, (fine, what) in _KEYS.items():
        if _changes(value := draft.extras.get(name), fine):
            yield f"{name} is {_short(value)}: {what}"
    for name, (fine, what) in _ROPE.items():
        if _changes(value := rope.get(name), fine):
            yield f"rope_parameters.{name} is {_short(value)}: {what}"
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
