"""SpecForge's own draft class, made from a head's directory and run on given states."""

import torch
from _serve import serve
from safetensors.torch import load_file
from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
from specforge.modeling.draft.registry import DRAFT_REGISTRY


def run(head, states, ids):
    """What the draft computes from captured ``states`` [T, K*H] and token ``ids`` [T]."""
    config = AutoDraftModelConfig.from_file(f"{head}/config.json")
    draft = AutoDraftModel.from_config(config, torch_dtype=torch.float32).eval()
    draft.load_state_dict(load_file(f"{head}/model.safetensors"), strict=False)
    weight = draft.embed_tokens.weight
    with torch.no_grad():
        weight.copy_(torch.arange(weight.numel()).sin().view_as(weight))
        tokens = torch.tensor([ids])
        combined = draft.project_hidden_states(torch.tensor([states]))
        length = len(ids)
        fed_back = draft.backbone(
            input_embeds=draft.embed_input_ids(tokens),
            hidden_states=combined,
            cache_hidden=None,
            attention_mask=torch.full((length, length), -1e9).triu(1)[None, None],
            position_ids=torch.arange(length)[None],
        )
        logits = draft.compute_logits(fed_back)
    return {
        "class": type(draft).__name__,
        "combined": combined[0].tolist(),
        "fed_back": fed_back[0].tolist(),
        "logits": logits[0].tolist(),
        "fc_inputs": draft.fc.in_features,
    }


def architectures():
    """The registered names."""
    return sorted(DRAFT_REGISTRY)


serve(run, architectures)
