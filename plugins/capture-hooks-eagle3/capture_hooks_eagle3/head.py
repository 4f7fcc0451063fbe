"""The EAGLE-3 head: modules, the training-time-test objective, and the drafting face."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture_hooks.errors import HeadError
from capture_hooks.heads.contract import DraftHead, StepSums, TargetReadout, TrainBatch
from capture_hooks.spec import CaptureSpec

from .attention import attend
from .config import Eagle3Config
from .functional import rms_norm, rotate, swiglu
from .layers import Layer, LayerWeights, RMSNorm, layer_weights
from .loss import Teacher, soft_target_loss
from .plan import Plan, Step, make_plan, teaching_rows
from .rope import RotaryTable, inverse_frequencies


@dataclass(slots=True)
class _Memory:
    """One layer's keys and values while a batch is trained on: the context's, and each row's own."""

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


class Eagle3Head(DraftHead):
    """A draft head of arXiv 2503.01840, with EAGLE-3.1's options (arXiv 2605.09992).

    Row t of a sequence is made of the captured states ``g[t]`` and the token ``x[t+1]``; a drafted row
    of its predecessor's output and the drafted token.  Row t of step j stands at RoPE position t + j.

    **Objective** (training-time test over J steps).  At step j, row t eats ``g[t]`` (j = 0) or row t
    of step j-1's output (j > 0) with token ``x[t+1+j]``; it sees rows 0..t of step 0 and its own rows
    of steps 1..j; it learns the target's ``p(. | x[<= t+1+j])``, restricted to the draft vocabulary and
    renormalised, with weight ``loss_mask[t+2+j]`` and factor ``step_decay ** j``.  A row whose target
    arg-max lies outside the draft vocabulary has weight 0 in the loss (``outside="skip"``, as in
    SafeAILab/EAGLE and SpecForge) or teaches the renormalised distribution (``"renormalise"``); in
    ``StepSums.hits`` it is a miss and in ``StepSums.rows`` it counts, either way.

    **One input.**  A head of one input has no ``fc`` (SGLang 0.5.23 never applies it where the captured
    width is the embedding's); the file carries the identity for readers that do.
    """

    name: ClassVar[str] = "eagle3"
    input_scale: Tensor
    draft_ids: Tensor
    target_rows: Tensor
    target_bias: Tensor | None

    def __init__(
        self,
        config: Eagle3Config,
        spec: CaptureSpec,
        target_layers: int,
        embedding: Tensor,
        readout: TargetReadout,
        draft_token_ids: Tensor,
    ) -> None:
        """Random weights of the shapes that ``config`` (filled) says; see `plugin.create` for the start.

        Args:
            config: every architecture setting given (`Eagle3Config.filled`).
            spec: the inputs; layers are made absolute.
            target_layers: decoder layers of the target.
            embedding: [V, H] the target's table, shared and not copied unless it is trained.
            readout: how the target's states become logits, over its full vocabulary.
            draft_token_ids: [D] int64 ascending.

        Raises:
            HeadError: for options that contradict each other or the target.
        """
        super().__init__()
        self.config, self.spec, self.target_layers = config, spec.absolute(target_layers), target_layers
        vocabulary, hidden = embedding.shape
        self.hidden_size, self.inputs = hidden, len(spec)
        _check_draft_ids(draft_token_ids, min(vocabulary, readout.weight.shape[0]))
        if self.inputs == 1 and (config.norm_before_fc or config.fc_norm):
            raise HeadError(
                f"eagle3: a head of one input ({spec}) has no fc, so norm_before_fc and fc_norm mean nothing; "
                "unset them or capture more points"
            )
        width = self.inputs * hidden
        if self.inputs > 1:
            self.fc = nn.Linear(width, hidden, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden) for _ in range(self.inputs))
        self.layers = nn.ModuleList(Layer(config, hidden, first=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, draft_token_ids.shape[0], bias=False)
        self.lm_head.weight.requires_grad_(config.train_lm_head)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

        self.register_buffer("input_scale", torch.ones(width))
        self.register_buffer("draft_ids", draft_token_ids.clone(), persistent=True)
        if config.train_embedding:
            self.embedding: Tensor = nn.Parameter(embedding.detach().to(torch.get_default_dtype(), copy=True))
        else:
            self.register_buffer("embedding", embedding.detach(), persistent=False)
        self._set_readout(readout)
        assert config.rope is not None and config.head_dim and config.max_position_embeddings
        self.rotary = RotaryTable(
            *inverse_frequencies(config.rope, config.head_dim, config.max_position_embeddings)
        )

    def _set_readout(self, readout: TargetReadout) -> None:
        self._full_readout = (readout,)  # in a tuple: the target's own modules are not ours to register
        rows = self.draft_ids
        bias = None if readout.bias is None else readout.bias.detach()[rows.to(readout.bias.device)]
        self.register_buffer(
            "target_rows", readout.weight.detach()[rows.to(readout.weight.device)], persistent=False
        )
        self.register_buffer("target_bias", bias, persistent=False)
        if readout.norm is not None:
            self._target_norm = (copy.deepcopy(readout.norm).requires_grad_(False),)
        # DistributedDataParallel would broadcast these large constants at every forward.
        self._ddp_params_and_buffers_to_ignore = ["embedding", "target_rows", "target_bias"]

    # -- what the target gives -------------------------------------------------------------------

    @property
    def draft_token_ids(self) -> Tensor:
        return self.draft_ids

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return self.draft_ids[draft_ids]

    def _readout(self, device: torch.device) -> TargetReadout:
        """The target's readout over the draft vocabulary."""
        full = self._full_readout[0]
        norm = None if full.norm is None else self._target_norm[0].to(device)
        return TargetReadout(self.target_rows, self.target_bias, full.scale, full.softcap, norm)

    @torch.no_grad()
    def _greedy(self, states: Tensor, budget: int) -> Tensor:
        """[R] the target's greedy tokens after ``states`` [R, H], over its full vocabulary, in chunks."""
        full, device = self._full_readout[0], states.device
        if full.weight.device != device:
            moved = [None if t is None else t.to(device) for t in (full.weight, full.bias)]
            assert moved[0] is not None
            norm = None if full.norm is None else copy.deepcopy(full.norm).to(device)
            full = TargetReadout(moved[0], moved[1], full.scale, full.softcap, norm)
            self._full_readout = (full,)
        chunk = max(1, budget // full.weight.shape[0])
        found = [full.logits(part).argmax(-1) for part in states.split(chunk)]
        return torch.cat(found) if found else states.new_zeros(0, dtype=torch.int64)

    # -- training ----------------------------------------------------------------------------------

    def forward(self, batch: TrainBatch) -> StepSums:
        """Training-time-test sums; see the class for the objective.

        Multiplies in the autocast dtype where autocast is on, else in the parameters'; norms,
        softmaxes and the loss are at least float32.
        """
        device = batch.states.device
        dtype = _compute_dtype(self.norm.weight)
        with torch.autocast(device.type, enabled=False):
            return self._sums(batch, device, dtype)

    def _sums(self, batch: TrainBatch, device: torch.device, dtype: torch.dtype) -> StepSums:
        config = self.config
        assert config.heads
        starts, mask = batch.starts.cpu(), batch.loss_mask.cpu()
        scores, elements = (2**19, 2**20) if device.type == "cpu" else (2**25, 2**26)

        teaching = teaching_rows(mask, starts)
        everything = teaching.nonzero().squeeze(1)
        on_device = everything.to(device)
        if batch.argmax is not None:
            greedy = batch.argmax.index_select(0, on_device)
        else:
            greedy = self._greedy(batch.target.index_select(0, on_device), 8 * elements)
        greedy = self._draft_index(greedy)
        rows = _rows_per_step(everything, starts, config.steps)
        if config.outside == "skip":
            inside = (greedy >= 0).cpu()
            teaching[everything] = inside
            greedy = greedy[greedy >= 0]
        plan = make_plan(
            teaching,
            starts,
            config.steps,
            device,
            context_asks=config.layers > 1,
            score_budget=max(1, scores // config.heads),
            chunk=max(1, elements // self.draft_ids.shape[0]),
        )
        hidden = self._outputs(batch, plan, dtype)
        teacher = Teacher(batch.target.index_select(0, plan.targets), self._readout(device), greedy, plan)
        loss, hits = soft_target_loss(hidden, self.lm_head.weight.to(dtype), teacher)
        weight = torch.tensor([s.counted.shape[0] for s in plan.steps])
        factors = torch.tensor([config.step_decay**j for j in range(config.steps)], dtype=torch.float64)
        weight, rows, factors = (x.to(device, loss.dtype) for x in (weight, rows, factors))
        return StepSums(loss, weight, hits, rows, factors)

    def _draft_index(self, token_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids of target ids, -1 where there is none."""
        found = torch.searchsorted(self.draft_ids, token_ids).clamp_(max=self.draft_ids.shape[0] - 1)
        return torch.where(self.draft_ids[found] == token_ids, found, -1)

    def _outputs(self, batch: TrainBatch, plan: Plan, dtype: torch.dtype) -> Tensor:
        """Normed outputs [M, H] of the counted rows, step after step, in ``dtype``."""
        weights = [layer_weights(layer, dtype) for layer in self._layers()]
        memories: list[_Memory] = []
        eaten = self._embedded(batch.token_ids.index_select(0, plan.tokens), dtype)
        assert weights[0].embed_q is not None and weights[0].embed_kv is not None
        embed_kv = F.linear(eaten, weights[0].embed_kv)
        embed_q = F.linear(eaten.index_select(0, plan.query_tokens), weights[0].embed_q)
        h = self.combine(batch.states.index_select(0, plan.context), dtype)
        normed = []
        for j, step in enumerate(plan.steps):
            if j > 0:
                h = h.index_select(0, step.rows)
            for index, layer_weight in enumerate(weights):
                extra = None
                if index == 0:
                    extra = (embed_q.index_select(0, step.query_tokens), embed_kv.index_select(0, step.tokens))
                h = self._layer(index, layer_weight, h, extra, plan, step, memories)
            counted = h.index_select(0, step.counted)
            if self.config.norm_output:
                h = rms_norm(h, self.norm.weight, self._eps)
                normed.append(h.index_select(0, step.counted).to(dtype))
            else:
                normed.append(rms_norm(counted, self.norm.weight, self._eps, dtype))
        return torch.cat(normed)

    def _layer(
        self,
        index: int,
        weights: LayerWeights,
        h: Tensor,
        extra: tuple[Tensor, Tensor] | None,
        plan: Plan,
        step: Step,
        memories: list[_Memory],
    ) -> Tensor:
        """One layer at one step; step 0 comes first and fills ``memories``, and may narrow the rows."""
        first_step = len(memories) <= index
        everyone_asks = first_step and index + 1 < self.config.layers
        queries, rope = step.queries, step.rope
        if everyone_asks:
            queries, rope = plan.context_queries, plan.context_rope
        table = self.rotary.upto(plan.longest, h.device, weights.q.dtype)

        read, residual = self.read(index, h, weights.q.dtype)
        k, v = self._split(_linear(read, weights.kv, None if extra is None else extra[1])).unbind(1)
        k = rotate(k, *_at(table, plan.context_rope if first_step else rope))
        if first_step:
            memories.append(_Memory(k, v))
            if not everyone_asks:
                read, residual = read.index_select(0, step.rows), residual.index_select(0, step.rows)
        else:
            memories[index].keep(step.rows, k, v)
        q = _linear(read, weights.q, None if extra is None else extra[0])
        q = rotate(q.view(q.shape[0], self.config.heads, self.config.head_dim), *_at(table, rope))
        memory = memories[index]
        mixed = attend(q, memory.k, memory.v, queries, memory.own_k, memory.own_v)
        return self.rest(index, weights, residual, mixed.flatten(1))

    # -- pieces shared with drafting ---------------------------------------------------------------

    @property
    def _eps(self) -> float:
        assert self.config.rms_norm_eps is not None
        return self.config.rms_norm_eps

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _split(self, kv: Tensor) -> Tensor:
        return kv.view(kv.shape[0], 2, self.config.kv_heads, self.config.head_dim)

    def _embedded(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """``input_layernorm(embedding)`` of tokens, as layer 0 reads it."""
        rows = F.embedding(ids, self.embedding).to(self.norm.weight.dtype)
        return rms_norm(rows, self._layers()[0].input_layernorm.weight, self._eps, dtype)

    def combine(self, states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """What layer 0 gets for captured states [T, K*H]: norms as configured, scale, noise, ``fc``."""
        own = self.norm.weight.dtype
        x = states.to(own)
        if self.config.norm_before_fc:
            x = rms_norm(x, self.input_norm.weight, self._eps)
        elif self.config.fc_norm:
            parts = x.split(self.hidden_size, -1)
            norms = [norm for norm in self.fc_norm if isinstance(norm, RMSNorm)]
            x = torch.cat([rms_norm(p, n.weight, self._eps) for p, n in zip(parts, norms, strict=True)], -1)
        if self.inputs > 1:
            x = x * self.input_scale
        if self.training and self.config.feature_noise:
            x = x * torch.randn_like(x).mul_(self.config.feature_noise).add_(1)
        if self.inputs == 1:
            return x
        dtype = dtype or own
        return F.linear(x.to(dtype), self.fc.weight.to(dtype)).to(own)

    def read(self, index: int, h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What layer ``index`` reads of ``h``, and its residual."""
        layer = self._layers()[index]
        if index > 0:
            return rms_norm(h, layer.input_layernorm.weight, self._eps, dtype), h
        if self.config.norm_before_residual:
            residual = rms_norm(h, layer.hidden_norm.weight, self._eps)
            return residual.to(dtype), residual
        return rms_norm(h, layer.hidden_norm.weight, self._eps, dtype), h

    def rest(self, index: int, weights: LayerWeights, residual: Tensor, mixed: Tensor) -> Tensor:
        """A layer after its attention: output projection, residual, MLP."""
        x = residual + F.linear(mixed, weights.out)
        gain = self._layers()[index].post_attention_layernorm.weight
        inner = swiglu(F.linear(rms_norm(x, gain, self._eps, mixed.dtype), weights.gate_up))
        return x + F.linear(inner, weights.down)

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., D]; ``hidden`` is what `extend` and `step` return."""
        if not self.config.norm_output:
            hidden = rms_norm(hidden, self.norm.weight, self._eps)
        return F.linear(hidden, self.lm_head.weight)

    # -- drafting (filled in by drafting.py) -------------------------------------------------------

    def new_cache(self, max_length: int) -> Any:
        raise NotImplementedError

    def extend(self, cache: Any, states: Tensor, next_ids: Tensor, start: int) -> Tensor:
        raise NotImplementedError

    def step(
        self, cache: Any, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        raise NotImplementedError

    def export(self, order: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        raise NotImplementedError

    # -- starting ------------------------------------------------------------------------------------

    @torch.no_grad()
    def calibrate(self, states: Tensor) -> None:
        """Scale each captured channel to rms 1 over ``states`` [T, K*H], a few thousand rows.

        ``fc`` then learns on channels of like size; the scale is folded into it on export, so the
        head's architecture is unchanged.  Attention sinks (rows whose norm is over ten times the
        median's, such as position 0 of most models) are left out.  ``fc`` itself is not changed.
        """
        if self.inputs == 1 or not self.config.scale_inputs:
            return
        x = states.to(torch.float32)
        norms = x.norm(dim=-1)
        usual = x[norms <= 10 * norms.median()]
        rms = usual.square().mean(0).sqrt()
        self.input_scale.copy_(1 / rms.clamp(min=1e-3))


def _compute_dtype(like: Tensor) -> torch.dtype:
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def _at(table: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    return table[0].index_select(0, positions), table[1].index_select(0, positions)


def _linear(x: Tensor, weight: Tensor, extra: Tensor | None) -> Tensor:
    return F.linear(x, weight) if extra is None else torch.addmm(extra, x, weight.t())


def _rows_per_step(teaching: Tensor, starts: Tensor, steps: int) -> Tensor:
    """[J] how many of the teaching rows (ascending, at least one past a start) serve each step."""
    first = starts[torch.searchsorted(starts, teaching, right=True) - 1]
    served = (teaching - first).clamp(max=steps)
    return torch.tensor([int((served > j).sum()) for j in range(steps)])


def _check_draft_ids(ids: Tensor, vocabulary: int) -> None:
    if ids.ndim != 1 or ids.shape[0] == 0 or ids.dtype != torch.int64:
        raise HeadError(f"eagle3: draft token ids must be a non-empty int64 vector, not {ids.dtype} {list(ids.shape)}")
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise HeadError(
            f"eagle3: draft token ids must ascend without repeats inside 0..{vocabulary - 1}; "
            f"they go from {int(ids.min())} to {int(ids.max())}"
        )
