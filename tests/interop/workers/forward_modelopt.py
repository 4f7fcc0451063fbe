"""ModelOpt's own EagleModule, made from what its exporter writes.

Since 0.41 it runs layer 0's ``input_layernorm`` over the states before ``hidden_norm`` (the stock decoder
layer does, and the hook norms again).  With ``ONCE=1`` that first norm is taken out, which is what every
server computes.
"""

import json
import os
from pathlib import Path

import torch
from _forward import causal, forward_all
from modelopt.torch.speculative.plugins.modeling_eagle import EagleModule
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer


class Once(LlamaDecoderLayer):
    """The stock layer whose own ``input_layernorm`` is skipped where the hook norms anyway."""

    def forward(self, hidden_states, **kwargs):
        if not hasattr(self, "hidden_norm"):
            return super().forward(hidden_states, **kwargs)
        mixed, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        hidden_states = hidden_states + mixed
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def outputs_of(head: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    written = json.loads((head / "config.json").read_text())
    config = LlamaConfig(
        **written | written.pop("eagle_config"), eagle_decoder_type="llama", has_lm_head=True
    )
    config._attn_implementation = "eager"
    layer = Once if os.environ.get("ONCE") else LlamaDecoderLayer
    model = EagleModule(config, layer).float().eval()
    state = load_file(head / "model.safetensors")
    state.pop("embed_tokens.weight", None)  # it is handed embeddings
    for index in range(1, config.num_hidden_layers):  # SGLang's name of the same norm
        state.pop(f"layers.{index}.hidden_norm.weight", None)
    model.load_state_dict(state)
    model._maybe_init_rope()
    rows = len(given["states"])
    embedded = torch.nn.functional.embedding(given["next_ids"], given["embedding"])
    normed, _, _ = model(model.fc(given["states"][None]), embedded[None], causal(rows))
    return {"logits": model.lm_head(normed)[0]}


forward_all(outputs_of)
