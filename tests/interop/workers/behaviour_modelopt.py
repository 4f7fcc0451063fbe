"""ModelOpt's own draft module: which norms its first layer applies, and what its exporter writes."""

import copy

import modelopt.torch.speculative as mtsp
import torch
from _serve import serve
from modelopt.torch.export.plugins.hf_spec_export import EagleExporter
from modelopt.torch.speculative.config import eagle3_default_config
from transformers import AutoModelForCausalLM


def _converted(target, ids):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    shape = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    architecture = copy.deepcopy(eagle3_default_config) | {
        **{name: getattr(model.config, name) for name in shape},
        "draft_vocab_size": model.config.vocab_size,
        "torch_dtype": "float32",
        "_attn_implementation": "sdpa",
        "eagle_aux_hidden_state_layer_ids": ids,
    }
    mode = {"eagle_use_torch_compile": False, "eagle_architecture_config": architecture}
    mtsp.convert(model, [("eagle", mode)])
    return model


def norms(target, states):
    """Relative distance of what layer 0's attention is fed from ``hidden_norm(h)`` and from
    ``hidden_norm(input_layernorm(h))``, with random norm weights and h [T, H]."""
    module = _converted(target, [0, 2, 5]).eagle_module
    layer, fed = module.layers[0], []
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for norm in (layer.input_layernorm, layer.hidden_norm):
            norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
    layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    hidden = torch.tensor([states])
    length, width = hidden.shape[1:]
    mask = torch.full((length, length), -1e9).triu(1)[None, None]
    module._maybe_init_rope()
    with torch.no_grad():
        module(hidden, torch.randn(1, length, width, generator=generator), mask, torch.arange(length)[None])
        found = fed[0][..., width:]
        once, twice = layer.hidden_norm(hidden), layer.hidden_norm(layer.input_layernorm(hidden))
    return {
        "once": float((found - once).norm() / once.norm()),
        "twice": float((found - twice).norm() / twice.norm()),
    }


def exported(target, ids):
    """The config that its exporter writes, everything by default."""
    return EagleExporter(_converted(target, ids))._export_config()


serve(norms, exported)
