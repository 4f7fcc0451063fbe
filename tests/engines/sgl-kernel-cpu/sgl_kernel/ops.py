"""Registers the operators that SGLang reaches as ``torch.ops.sgl_kernel.*`` on every CPU.

Only those it calls without asking first: ``hasattr(torch.ops.sgl_kernel, …)`` decides about many others
(``convert_weight_packed`` stands for AMX itself in ``srt/utils/common.py``), so none is defined idly.
"""

from __future__ import annotations

import torch

from . import attention, hashing

#: Arguments in the order of ``srt/layers/attention/intel_amx_backend.py``, SGLang 0.5.23.
SCHEMAS = {
    "decode_attention_cpu": (
        "(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale, "
        "Tensor(c!) output, Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, "
        "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, "
        "bool is_cross_attn=False, int sliding_window_size=0, Tensor? encoder_lens=None, "
        "Tensor? sinks=None) -> ()"
    ),
    "extend_attention_cpu": (
        "(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer, "
        "Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, "
        "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, "
        "float sm_scale, float logit_cap, bool is_cross_attn=False, int sliding_window_size=0, "
        "Tensor? encoder_lens=None, Tensor? sinks=None, Tensor? tree_mask=None, "
        "bool is_causal=True) -> ()"
    ),
    "murmur_hash32_cpu": "(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor",
}

#: Operators live as long as the library that defined them.
_library: torch.library.Library | None = None


def register() -> None:
    """Define `SCHEMAS` under ``torch.ops.sgl_kernel``, for CPU tensors."""
    global _library
    _library = torch.library.Library("sgl_kernel", "FRAGMENT")
    implementations = {
        "decode_attention_cpu": attention.decode_attention_cpu,
        "extend_attention_cpu": attention.extend_attention_cpu,
        "murmur_hash32_cpu": hashing.murmur_hash32_cpu,
    }
    for name, schema in SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, implementations[name], "CPU")
