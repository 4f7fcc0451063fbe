"""SpecForge's own LlamaForCausalLMEagle3, from its own reader of draft configs."""

from pathlib import Path

import torch
from _forward import causal, forward_all
from safetensors.torch import load_file
from specforge.modeling.auto import AutoDraftModelConfig
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from torch import Tensor


def outputs_of(head: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    config = AutoDraftModelConfig.from_file(str(head / "config.json"))
    model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float().eval()
    state = load_file(head / "model.safetensors")
    state.setdefault("embed_tokens.weight", given["embedding"])
    whole = config.draft_vocab_size == config.vocab_size  # then a head carries no maps
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"t2d", "d2t"} if whole else set()), missing
    rows = len(given["states"])
    out = model.backbone(
        input_embeds=model.embed_input_ids(given["next_ids"][None]),
        hidden_states=model.project_hidden_states(given["states"][None]),
        cache_hidden=[[], []],
        attention_mask=causal(rows),
        position_ids=torch.arange(rows)[None],
    )
    return {"logits": model.compute_logits(out)[0]}


forward_all(outputs_of)
