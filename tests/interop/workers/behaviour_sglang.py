"""SGLang's own EAGLE-3 draft classes: made from a head's directory, run inside a target's forward pass."""

import torch
from _serve import serve
from _sglang_target import runner, start, within
from safetensors.torch import load_file
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.models import kimi_k25_eagle3, llama_eagle3
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_context, get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import AutoConfig


def _draft(head):
    config = AutoConfig.from_pretrained(head)
    draft = ModelRegistry.resolve_model_cls(config.architectures)[0](config)
    with torch.no_grad():
        for parameter in draft.parameters():  # what no file fills stays at ones, as norms begin
            parameter.fill_(1)
    draft.load_weights(load_file(f"{head}/model.safetensors").items())
    return draft


def run(target, head, states, ids):
    """What the draft computes from captured ``states`` [T, K*H] and ``ids`` [T] in the target's embedding."""
    start(target)
    draft = _draft(head)
    found = {}

    def call(module, batch):
        embeds = module.embed_tokens(torch.tensor(ids))
        hidden, (fed_back,) = draft.model(
            torch.tensor(ids), torch.arange(len(ids)), batch, input_embeds=embeds
        )
        found.update(hidden=hidden.tolist(), fed_back=fed_back.tolist())

    within(torch.tensor(states), ids, call)
    hot = draft.hot_token_id
    return {
        "class": type(draft).__name__,
        "fc_inputs": fc.in_features if hasattr(fc := draft.model.fc, "in_features") else fc.input_size,
        "hot_token_id": None if hot is None else hot.tolist(),
        "lm_head_is_embedding": draft.lm_head is draft.model.embed_tokens,
        "load_lm_head_from_target": draft.load_lm_head_from_target,
        **found,
    }


def embedding_after_sharing(target, head):
    """Whether the draft's embedding is the target's once SGLang's worker has shared it (``set_embed``)."""
    start(target)
    draft = _draft(head)
    shared = runner().model.get_embed_and_head()[0]
    draft.set_embed(shared)
    return draft.model.embed_tokens.weight is shared


def ids_of(target, head):
    """Whether SGLang feeds a head intermediate states, and the ids that it takes from its config."""
    start(target)
    get_context().override("a test", speculative_draft_model_path=head)
    found = resolve_spec_aux_hidden_state_config(
        server_args=get_server_args(),
        model_config=runner().model_config,
        spec_algorithm=SpeculativeAlgorithm.EAGLE3,
        is_draft_worker=False,
    )
    return [bool(found.eagle_use_aux_hidden_state), found.eagle_aux_hidden_state_layer_ids]


def eagle3_names():
    """The architecture names of SGLang's EAGLE-3 draft modules."""
    return [entry.__name__ for module in (llama_eagle3, kimi_k25_eagle3) for entry in module.EntryClass]


def serves(name):
    """Whether SGLang has a draft class of this name in its EAGLE-3 modules."""
    try:
        module = ModelRegistry.resolve_model_cls([name])[0].__module__
    except ValueError:
        return False
    return module in (llama_eagle3.__name__, kimi_k25_eagle3.__name__)


serve(run, ids_of, embedding_after_sharing, eagle3_names, serves)
