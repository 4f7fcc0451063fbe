"""vLLM's own EAGLE-3 draft classes: made from a head's directory, and run on given states.

Attention has no cache here, as in vLLM's own memory profiling, and leaves its output as it was allocated; it
counts as zero.  Everything else is computed.
"""

import torch
from _serve import serve
from _vllm_draft import config_of, draft_of
from transformers import LlamaConfig
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _VLLM_MODELS
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig


def run(target, head, states, ids):
    """What the draft computes from captured ``states`` [T, K*H] and token ``ids`` [T]."""
    config = config_of(target, head)
    draft = draft_of(config)
    attended = []
    for layer in draft.model.layers:
        attention = layer.self_attn
        first = attention.qkv_proj if hasattr(attention, "qkv_proj") else attention.fused_qkv_a_proj
        first.register_forward_pre_hook(
            lambda module, args, kwargs: attended.append((*args, *kwargs.values())[0].tolist()),
            with_kwargs=True,
        )
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (torch.zeros_like(args[0]),))
    embedding = torch.nn.Embedding(draft.config.vocab_size, draft.config.hidden_size)
    with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config):
        embedding.weight.copy_(torch.arange(embedding.weight.numel()).sin().view_as(embedding.weight))
        tokens = torch.tensor(ids)
        combined = draft.combine_hidden_states(torch.tensor(states))
        hidden, fed_back = draft(tokens, torch.arange(len(ids)), combined, embedding(tokens))
    inner = draft.model
    return {
        "class": type(draft).__name__,
        "module": type(draft).__module__,
        "combined": combined.tolist(),
        "hidden": hidden.tolist(),
        "fed_back": fed_back.tolist(),
        "attended": attended,
        "fc_inputs": inner.fc.input_size if hasattr(inner, "fc") else None,
    }


def draft_config(config):
    """What vLLM makes of a speculators head's ``config.json``."""
    return SpeculatorsConfig.extract_transformers_pre_trained_config(config)


def draft_modules(names):
    """The module of the draft class for each architecture name, as method ``eagle3`` looks it up; or null."""
    found = {}
    for name in names:
        (renamed,) = EAGLEConfig(LlamaConfig(architectures=[name]), method="eagle3").architectures
        known = renamed in ModelRegistry.get_supported_archs()
        found[name] = _VLLM_MODELS[renamed][0] if known and renamed in _VLLM_MODELS else None
    return found


def eagle3_names():
    """Every registered name whose class lies in one of the EAGLE-3 modules."""
    return {
        name: place[0]
        for name, place in _VLLM_MODELS.items()
        if place[0] in ("llama_eagle3", "qwen3_eagle3", "deepseek_eagle3")
    }


serve(run, draft_config, draft_modules, eagle3_names)
