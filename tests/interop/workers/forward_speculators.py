"""speculators' own Eagle3DraftModel, read by its own ``from_pretrained``."""

from pathlib import Path

import torch
from _forward import forward_all
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from torch import Tensor


def outputs_of(head: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    config = Eagle3SpeculatorConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
    if "embed_tokens.weight" not in load_file(head / "model.safetensors"):  # as load_verifier_weights does
        model.embed_tokens.weight.data.copy_(given["embedding"])
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output))
    rows = len(given["states"])
    model(
        hidden_states=given["states"][None],
        input_ids=given["next_ids"][None],
        document_ids=torch.zeros(1, rows, dtype=torch.long),
        ttt_steps=1,
    )
    return {"logits": seen[0][0]}


forward_all(outputs_of)
