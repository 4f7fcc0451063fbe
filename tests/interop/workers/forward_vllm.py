"""vLLM's own Eagle3LlamaForCausalLM, its weights by its own loader, its attention over one block of cache."""

import gc
from pathlib import Path

import torch
from _forward import TARGET, forward_all
from _vllm_draft import config_of, draft_of
from torch import Tensor
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata


def outputs_of(head: Path, given: dict[str, Tensor]) -> dict[str, Tensor]:
    config = config_of(TARGET, str(head))
    draft = draft_of(config)
    if not draft.has_own_embed_tokens:
        table = draft.model.embed_tokens
        table.weight_loader(table.weight, given["embedding"])
    ids = given["next_ids"]
    rows = torch.arange(len(ids))
    with set_current_vllm_config(config):
        metadata, slots = attention_of(config, len(ids))
        with set_forward_context(metadata, config, num_tokens=len(ids), slot_mapping=slots):
            hidden, fed_back = draft(ids, rows, draft.combine_hidden_states(given["states"]))
            whole = draft.compute_logits(hidden)  # over the target's vocabulary, -inf where it cannot draft
    drafted = whole[0].isfinite().nonzero().squeeze(1)
    return {"logits": whole[:, drafted], "token_ids": drafted, "fed_back": fed_back}


def attention_of(config, rows: int):
    """Metadata and slots by layer for one request of ``rows`` tokens in the first block of a fresh cache."""
    layers = get_layers_from_vllm_config(config, Attention)
    starts = torch.tensor([0, rows], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([rows], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=rows,
        max_query_len=rows,
        max_seq_len=rows,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(rows),
    )
    metadata = {}
    for name, layer in layers.items():
        spec = layer.get_kv_cache_spec(config)
        assert rows <= spec.block_size
        layer.bind_kv_cache(torch.zeros(1, spec.num_kv_heads, spec.block_size, 2 * spec.head_size))
        builder = layer.get_attn_backend().get_builder_cls()
        made = builder(spec, [name], config, torch.device("cpu"))
        metadata[name] = made.build(common_prefix_len=0, common_attn_metadata=batch)
    return metadata, dict.fromkeys(layers, batch.slot_mapping)


gc.freeze()  # vLLM collects garbage twice for each model that it loads, through all that was imported
forward_all(outputs_of)
