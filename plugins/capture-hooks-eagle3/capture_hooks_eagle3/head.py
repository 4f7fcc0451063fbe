"""The EAGLE-3 head: what training and decoding call."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from capture_hooks.errors import HeadError
from capture_hooks.heads.contract import DraftHead, StepSums, TargetReadout, TrainBatch
from capture_hooks.heads.drafting import Drafting, StepwiseDrafter
from capture_hooks.spec import CaptureSpec

from .checkpoint import export_config, export_tensors
from .config import Eagle3Config
from .drafting import DraftCache
from .functional import rotate
from .loss import Teacher, soft_target_loss
from .network import Network, step_weights
from .objective import step_outputs
from .plan import make_plan, rows_per_step, teaching_rows
from .rope import at


class Eagle3Head(Network, DraftHead):
    """A draft head of arXiv 2503.01840, with EAGLE-3.1's options (arXiv 2605.09992).

    Row t of a sequence is made of the captured states ``g[t]`` and the token ``x[t+1]``; a drafted row
    of its predecessor's output and the drafted token.  Row t of step j stands at RoPE position t + j.

    **Objective** (training-time test over J steps).  At step j, row t takes ``g[t]`` (j = 0) or row t
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
    token_tables: ClassVar[frozenset[str]] = frozenset({"embedding", "lm_head.weight"})
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
        """Random weights of the shapes that ``config`` (filled) says; `Eagle3Provider` gives the start.

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
        vocabulary = readout.weight.shape[0]
        _check_draft_ids(draft_token_ids, min(vocabulary, embedding.shape[0]))
        if len(spec) == 1 and (config.norm_before_fc or config.fc_norm):
            raise HeadError(
                f"eagle3: a head of one input ({spec}) has no fc, so norm_before_fc and fc_norm mean "
                "nothing; unset them or capture more points"
            )
        super().__init__(config, len(spec), embedding, draft_token_ids, vocabulary)
        self.spec, self.target_layers = spec.absolute(target_layers), target_layers
        rows = draft_token_ids.to(readout.weight.device)
        bias = None if readout.bias is None else readout.bias.detach()[rows]
        self.register_buffer("target_rows", readout.weight.detach()[rows], persistent=False)
        self.register_buffer("target_bias", bias, persistent=False)
        # In a tuple: the target's own modules and full table are not this module's to register or move.
        self._target = (_frozen(readout, readout.weight.device),)

    # -- the target's side ---------------------------------------------------------------------------

    @property
    def draft_token_ids(self) -> Tensor:
        """[D] int64 ascending: the target ids the head can draft."""
        return self.draft_ids

    def _draft_index(self, token_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids of target ids, -1 where there is none."""
        found = torch.searchsorted(self.draft_ids, token_ids).clamp_(max=self.draft_ids.shape[0] - 1)
        return torch.where(self.draft_ids[found] == token_ids, found, -1)

    def _full_readout(self, device: torch.device) -> TargetReadout:
        if self._target[0].weight.device != device:
            self._target = (_frozen(self._target[0], device),)
        return self._target[0]

    def _draft_readout(self, device: torch.device, dtype: torch.dtype) -> TargetReadout:
        """The target's readout over the draft vocabulary, in its own type or in the autocast one."""
        full, rows, bias = self._full_readout(device), self.target_rows, self.target_bias
        if dtype != self.dtype:
            rows, bias = rows.to(dtype), None if bias is None else bias.to(dtype)
        return TargetReadout(rows, bias, full.scale, full.softcap, full.norm)

    @torch.no_grad()
    def _greedy(self, states: Tensor, budget: int) -> Tensor:
        """[R] the target's greedy tokens after states [R, H], ``budget`` logits at a time."""
        readout = self._full_readout(states.device)
        found, rows = states.new_empty(states.shape[0], dtype=torch.int64), max(1, budget // self.vocab_size)
        for first in range(0, states.shape[0], rows):
            found[first : first + rows] = readout.logits(states[first : first + rows]).argmax(-1)
        return found

    # -- training ------------------------------------------------------------------------------------

    def forward(self, batch: TrainBatch) -> StepSums:
        """Training-time-test sums; see the class for the objective.

        Matrices (the target's rows too) multiply in the autocast dtype where autocast is on, else in
        their own; norms, softmaxes and the loss are at least float32.
        """
        kind = batch.states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.dtype
        with torch.autocast(kind, enabled=False):
            return self._sums(batch, dtype)

    def _sums(self, batch: TrainBatch, dtype: torch.dtype) -> StepSums:
        config, device = self.config, batch.states.device
        # Elements of one attention block and of one chunk of logits: a core's cache, or a GPU's width.
        scores, logits = (2**19, 2**19) if device.type == "cpu" else (2**25, 2**26)
        starts, mask = batch.starts.cpu(), batch.loss_mask.cpu()
        teaching = teaching_rows(mask, starts)
        scored = teaching.nonzero().squeeze(1)
        rows = rows_per_step(scored, starts, config.steps)
        if batch.argmax is None:
            greedy = self._greedy(batch.target.index_select(0, scored.to(device)), 16 * logits)
        else:
            greedy = batch.argmax.index_select(0, scored.to(device))
        greedy = self._draft_index(greedy)
        if config.outside == "skip":
            inside = greedy >= 0
            teaching[scored] = inside.cpu()
            greedy = greedy[inside]
        plan = make_plan(
            teaching,
            starts,
            config.steps,
            device,
            context_asks=config.layers > 1,
            score_budget=max(1, scores // self.sizes.heads),
            chunk=max(64, logits // self.draft_ids.shape[0]),
        )
        readout = self._draft_readout(device, dtype)
        teacher = Teacher(batch.target.index_select(0, plan.targets), readout, greedy, plan)
        hidden = step_outputs(self, batch.states, batch.token_ids, plan, dtype)
        loss, hits = soft_target_loss(hidden, self.lm_head.weight.to(dtype), teacher)
        weight = torch.tensor([step.counted.shape[0] for step in plan.steps])
        factors = torch.tensor([config.step_decay**j for j in range(config.steps)], dtype=torch.float64)
        return StepSums(loss, weight.to(loss), hits, rows.to(loss), factors.to(loss))

    @torch.no_grad()
    def calibrate(self, states: Tensor) -> None:
        """Scale each captured channel to rms 1 over ``states`` [T, K*H], a few thousand rows.

        ``fc`` then learns on channels of like size; the scale is folded into it on export, so the
        head's architecture is unchanged.  Attention sinks (rows whose norm is over ten times the
        median's, such as position 0 of most models) are left out.  Random columns of ``fc`` are left
        as they are; those that mean something already (``fc_learnt``) go on computing the same.
        """
        if self.inputs == 1 or not self.config.scale_inputs:
            return
        before = self.input_scale.clone()
        x = self.features(states.to(self.input_scale.device)).float()
        size = x.norm(dim=-1)
        usual = x[size <= 10 * size.median()]
        self.input_scale.copy_(1 / usual.square().mean(0).sqrt().clamp(min=1e-3))
        learnt = slice(self.fc_learnt, None)
        self.fc.weight[:, learnt] *= (before / self.input_scale)[learnt]

    # -- drafting ------------------------------------------------------------------------------------

    def drafter(self, max_length: int, drafting: Drafting) -> StepwiseDrafter:
        """Chains and trees, a token a step."""
        return StepwiseDrafter(self, max_length, drafting)

    @torch.no_grad()
    def new_cache(self, max_length: int) -> DraftCache:
        """An empty cache for one sequence, with the weights as they are now; reusable through ``start=0``."""
        shape = (self.sizes.kv_heads, max_length, self.sizes.head_dim)
        return DraftCache(
            keys=[self.norm.weight.new_zeros(shape) for _ in self.layers],
            values=[self.norm.weight.new_zeros(shape) for _ in self.layers],
            weights=[step_weights(layer) for layer in self.decoder_layers],
        )

    @torch.no_grad()
    def extend(self, cache: DraftCache, states: Tensor, next_ids: Tensor, start: int) -> Tensor:
        """Append rows made from captured states; row t stands at position t."""
        end = start + states.shape[0]
        cache.reserve(start, states.shape[0])
        positions = torch.arange(start, end, device=states.device)
        return self._append(cache, self.combine(states), next_ids, positions, end, None)

    @torch.no_grad()
    def step(
        self, cache: DraftCache, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Append drafted rows; ``positions`` are RoPE positions (a parent's plus one)."""
        cache.reserve(cache.length, hidden.shape[0])
        return self._append(cache, hidden, ids, positions, cache.max_length, mask)

    def _append(
        self, cache: DraftCache, h: Tensor, ids: Tensor, positions: Tensor, longest: int, mask: Tensor | None
    ) -> Tensor:
        rows, sizes = h.shape[0], self.sizes
        if rows == 0:
            return h
        turning = sizes.heads + sizes.kv_heads
        cos, sin = at(self.rotary.upto(longest, h.device, self.dtype), positions)
        for index, weights in enumerate(cache.weights):
            read, residual = self.read(index, h, self.dtype)
            if index == 0:
                read = torch.cat([self.embedded(ids, self.dtype), read], -1)
            qkv = F.linear(read, weights.qkv).view(rows, turning + sizes.kv_heads, sizes.head_dim)
            turned = rotate(qkv[:, :turning], cos, sin)
            mixed = cache.attend(
                index, turned[:, : sizes.heads], turned[:, sizes.heads :], qkv[:, turning:], mask
            )
            h = self.rest(index, weights, residual, mixed)
        cache.length += rows
        return self.normed(h, self.norm) if self.config.norm_output else h

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., D] of what `extend` and `step` return."""
        return self.readout(hidden)

    def export(self, order: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and fields as `checkpoint` describes; a calibrated input scale is folded into ``fc``."""
        return export_tensors(self, order), export_config(self)


def _frozen(readout: TargetReadout, device: torch.device) -> TargetReadout:
    """A readout on ``device`` that no gradient and no later change of the target's modules reaches."""
    bias = None if readout.bias is None else readout.bias.detach().to(device)
    norm = None
    if readout.norm is not None:
        norm = copy.deepcopy(readout.norm).requires_grad_(False).to(device)
    return TargetReadout(readout.weight.detach().to(device), bias, readout.scale, readout.softcap, norm)


def _check_draft_ids(ids: Tensor, vocabulary: int) -> None:
    if ids.ndim != 1 or ids.shape[0] == 0 or ids.dtype != torch.int64:
        raise HeadError(
            f"eagle3: draft token ids must be a non-empty int64 vector, not {ids.dtype} {list(ids.shape)}"
        )
    if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise HeadError(
            f"eagle3: draft token ids must ascend without repeats inside 0..{vocabulary - 1}; "
            f"they go from {int(ids.min())} to {int(ids.max())}"
        )
