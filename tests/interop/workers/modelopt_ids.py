"""ModelOpt's own hooks on tiny random llamas: which states its EAGLE-3 module is trained on."""

import copy

import modelopt.torch.speculative as mtsp
import torch
from _serve import serve
from modelopt.torch.speculative.config import eagle3_default_config
from modelopt.torch.speculative.plugins.hf_eagle import default_eagle_aux_layer_ids
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def captured(ids, n):
    """The boundaries of the stream that come out, in order, found by their values; [] for its default ids.

    Fails where the module's own ``fc`` cannot take them.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=n, vocab_size=64, initializer_range=0.5, **SIZES)
    ).eval()
    stream, layers = [], list(model.model.layers)
    architecture = copy.deepcopy(eagle3_default_config) | SIZES
    architecture |= {"_attn_implementation": "sdpa", "eagle_aux_hidden_state_layer_ids": ids}
    mode = {"eagle_use_torch_compile": False, "eagle_architecture_config": architecture}
    mtsp.convert(model, [("eagle", mode)])
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, args: stream.append(args[0]))
    layers[-1].register_forward_hook(
        lambda _, __, output: stream.append(output if isinstance(output, torch.Tensor) else output[0])
    )
    with torch.no_grad():
        model._base_model(torch.tensor([[3, 5, 7]]))
        states = model.pop_and_gather_aux_hiddens()
        model.eagle_module.fc(states)
    found = []
    for state in states.split(SIZES["hidden_size"], dim=-1):
        equal = [k for k, boundary in enumerate(stream) if torch.equal(state, boundary)]
        assert len(equal) == 1, equal
        found += equal
    return found


if __name__ == "__main__":
    serve(captured, default_eagle_aux_layer_ids)
