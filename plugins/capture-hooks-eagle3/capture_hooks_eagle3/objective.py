"""Training-time test: the rows of a plan through the network, step after step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import attend
from .functional import rotate
from .network import LayerWeights, Network, layer_weights
from .plan import Step, TrainingPlan
from .rope import at


@dataclass(slots=True)
class _Memory:
    """One layer's keys and values [rows, kv_heads, d]: the context's, and each active row's own."""

    k: Tensor
    v: Tensor
    own_k: Tensor | None = None
    own_v: Tensor | None = None

    def keep(self, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep the own keys of ``rows`` and add this step's."""
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        if self.own_k is None or self.own_v is None:
            self.own_k, self.own_v = k, v
        else:
            self.own_k = torch.cat([self.own_k.index_select(0, rows), k], 1)
            self.own_v = torch.cat([self.own_v.index_select(0, rows), v], 1)


def step_outputs(
    network: Network, states: Tensor, token_ids: Tensor, plan: TrainingPlan, dtype: torch.dtype
) -> Tensor:
    """Normed outputs [M, H] of the counted rows, step after step, in ``dtype`` (the type to multiply in)."""
    weights = [layer_weights(layer, dtype) for layer in network.decoder_layers]
    memories: list[_Memory] = []
    embed_q, embed_kv = weights[0].embedding_columns()
    eaten = network.embedded(token_ids.index_select(0, plan.tokens), dtype)
    from_tokens_q = F.linear(eaten.index_select(0, plan.query_tokens), embed_q)
    from_tokens_kv = F.linear(eaten, embed_kv)

    h = network.combine(states.index_select(0, plan.context), dtype)
    normed = []
    for j, step in enumerate(plan.steps):
        if j > 0:
            h = h.index_select(0, step.rows)
        for index, layer in enumerate(weights):
            extra = None
            if index == 0:
                extra = (
                    from_tokens_q.index_select(0, step.query_tokens),
                    from_tokens_kv.index_select(0, step.tokens),
                )
            h = _layer(network, index, layer, h, extra, plan, step, memories)
        if network.config.norm_output:
            h = network.normed(h, network.norm)
            normed.append(h.index_select(0, step.counted).to(dtype))
        else:
            normed.append(network.normed(h.index_select(0, step.counted), network.norm, dtype))
    return torch.cat(normed)


def _layer(
    network: Network,
    index: int,
    weights: LayerWeights,
    h: Tensor,
    extra: tuple[Tensor, Tensor] | None,
    plan: TrainingPlan,
    step: Step,
    memories: list[_Memory],
) -> Tensor:
    """One layer at one step; step 0 comes first, fills ``memories``, and narrows the rows in the last layer.

    ``extra`` is what the tokens add to q and to k and v (layer 0 only).
    """
    sizes = network.sizes
    first_step = len(memories) <= index
    everyone_asks = first_step and index + 1 < network.config.layers
    queries, rope = step.queries, step.rope
    if everyone_asks:
        queries, rope = plan.context_queries, plan.context_rope
    table = network.rotary.upto(plan.longest, h.device, weights.q.dtype)

    read, residual = network.read(index, h, weights.q.dtype)
    kv = _linear(read, weights.kv, None if extra is None else extra[1])
    k, v = kv.view(kv.shape[0], 2, sizes.kv_heads, sizes.head_dim).unbind(1)
    k = rotate(k, *at(table, plan.context_rope if first_step else rope))
    if first_step:
        memories.append(_Memory(k, v))
        if not everyone_asks:
            read, residual = read.index_select(0, step.rows), residual.index_select(0, step.rows)
    else:
        memories[index].keep(step.rows, k, v)
    q = _linear(read, weights.q, None if extra is None else extra[0])
    q = rotate(q.view(q.shape[0], sizes.heads, sizes.head_dim), *at(table, rope))
    memory = memories[index]
    mixed = attend(q, memory.k, memory.v, queries, memory.own_k, memory.own_v)
    return network.rest(index, weights, residual, mixed.flatten(1))


def _linear(x: Tensor, weight: Tensor, extra: Tensor | None) -> Tensor:
    return F.linear(x, weight) if extra is None else torch.addmm(extra, x, weight.t())
