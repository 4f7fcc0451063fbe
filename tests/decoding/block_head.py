"""A small head that drafts a block in one pass, with captured states injected as keys and values.

Nothing in it goes step by step: it shows that the decoder, training's figures and the contract tests ask for
no such thing.  Behind row t a block [x[t+1], mask, mask, ...] attends to the injected rows up to t and to
itself; its slot j + 1 predicts x[t+2+j].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture_hooks.capture import Anatomy
from capture_hooks.heads import DraftHead, StepSums, TargetReadout, TrainBatch
from capture_hooks.heads.drafting import Chain, Drafting, Proposal
from capture_hooks.spec import CaptureSpec


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Settings: tokens drafted in a block, and layers."""

    block: int = 3
    layers: int = 2


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [..., n, H] at positions [..., n]."""
    half = x.shape[-1] // 2
    angle = positions[..., None] / 50.0 ** (torch.arange(half, device=x.device) / half)
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Layer(nn.Module):
    """Attention over injected rows and the block, then a two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.up, self.down = (
            nn.Linear(width, width, bias=False) for _ in range(6)
        )

    def kept(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return turned(self.k(x), positions), self.v(x)

    def forward(
        self, x: Tensor, positions: Tensor, context: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Blocks x [T, B, H] at positions [T, B], context [C, H] twice, mask [T, C] of the rows each sees."""
        normed = F.rms_norm(x, x.shape[-1:])
        own = self.kept(normed, positions)
        keys, values = (
            torch.cat([rows.expand(len(x), -1, -1), mine], 1) for rows, mine in zip(context, own, strict=True)
        )
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(x.shape[:2])], 1)[:, None]
        x = x + self.o(F.scaled_dot_product_attention(turned(self.q(normed), positions), keys, values, mask))
        return x + self.down(F.silu(self.up(F.rms_norm(x, x.shape[-1:]))))


class BlockHead(DraftHead):
    """The head; embedding and output rows are the target's."""

    name = "block"
    embedding: Tensor
    rows: Tensor
    ids: Tensor
    passes = 0  # blocks computed while drafting

    def __init__(
        self,
        config: BlockConfig,
        spec: CaptureSpec,
        anatomy: Anatomy,
        readout: TargetReadout,
        draft_token_ids: Tensor,
    ) -> None:
        super().__init__()
        self.spec, self.target_layers = spec.absolute(anatomy.n_layers), anatomy.n_layers
        self.config, self._readout = config, (readout,)  # in a tuple: the target's norm is not this module's
        width = anatomy.hidden_size
        self.fc = nn.Linear(len(spec) * width, width, bias=False)
        self.mask = nn.Parameter(torch.randn(width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(config.layers))
        self.register_buffer("embedding", anatomy.embedding.weight.detach(), persistent=False)
        self.register_buffer("rows", readout.weight.detach()[draft_token_ids], persistent=False)
        self.register_buffer("ids", draft_token_ids.clone())

    @property
    def draft_token_ids(self) -> Tensor:
        return self.ids

    def context(self, states: Tensor, start: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of states [T, K*H] in each layer."""
        positions = torch.arange(start, start + len(states), device=states.device)
        rows = F.rms_norm(self.fc(states), self.fc.weight.shape[:1])
        return [layer.kept(rows, positions) for layer in self.layers]

    def logits(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        mask: Tensor | None = None,
    ) -> Tensor:
        """[T, block, D] for anchor tokens [T] at positions [T]."""
        size = self.config.block
        x = torch.cat([self.embedding[anchors][:, None], self.mask.expand(len(anchors), size, -1)], 1)
        at = positions[:, None] + torch.arange(size + 1, device=positions.device)
        for layer, rows in zip(self.layers, context, strict=True):
            x = layer(x, at, rows, mask)
        return F.rms_norm(x[:, 1:], x.shape[-1:]) @ self.rows.T

    def forward(self, batch: TrainBatch) -> StepSums:
        size, readout = self.config.block, self._readout[0]
        sums = torch.zeros(3, size, dtype=self.rows.dtype, device=self.rows.device)
        for a, b in zip(batch.starts.tolist(), batch.starts[1:].tolist(), strict=False):
            at = torch.arange(max(b - a - 2, 0), device=self.rows.device)  # rows with a token to predict
            if not len(at):
                continue
            seen = at[:, None] >= torch.arange(b - a, device=at.device)
            ids = batch.token_ids[a:b]
            logits = self.logits(ids[at + 1], at + 1, self.context(batch.states[a:b]), seen)
            wanted = readout.logits(batch.target[a:b])
            greedy = wanted.argmax(-1) if batch.argmax is None else batch.argmax[a:b]
            for j in range(size):
                rows = at[at + 2 + j < b - a]
                rows = rows[batch.loss_mask[a:b][rows + 2 + j]]
                # Sharpened: what counts is the most probable token, and a tiny random target is unsure.
                teacher = (8 * wanted[rows + 1 + j][:, self.ids]).softmax(-1)
                loss = -(teacher * logits[rows, j].log_softmax(-1)).sum()
                hits = (self.ids[logits[rows, j].argmax(-1)] == greedy[rows + 1 + j]).sum()
                one = torch.zeros_like(sums)
                one[:, j] = torch.stack([loss, hits.to(loss), loss.new_tensor(len(rows))])
                sums = sums + one
        loss, hits, rows = sums
        return StepSums(loss, rows.detach(), hits.detach(), rows.detach(), torch.ones_like(hits))

    def drafter(self, max_length: int, drafting: Drafting) -> BlockDrafter:
        return BlockDrafter(self, drafting)

    def export(self, order: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        columns = tensors["fc.weight"].unflatten(1, (len(self.spec), -1))
        tensors["fc.weight"] = columns[:, list(order)].flatten(1)
        return tensors, {"block": self.config.block, "layers": self.config.layers}


class BlockDrafter:
    """Keys and values of what was committed, and the block behind it."""

    def __init__(self, head: BlockHead, drafting: Drafting) -> None:
        self._head, self._drafting = head, drafting
        self._length = 0

    def accept(self, states: Tensor, next_ids: Tensor) -> None:
        new = self._head.context(states, self._length)
        if self._length:
            new = [
                (torch.cat([k, more]), torch.cat([v, other]))
                for (k, v), (more, other) in zip(self._context, new, strict=True)
            ]
        self._context, self._anchor = new, next_ids[-1:]
        self._length += len(next_ids)

    def propose(self, depth: int) -> Proposal:
        self._head.passes += 1
        position = torch.tensor([self._length], device=self._anchor.device)
        logits = self._head.logits(self._anchor, position, self._context)[0]
        chain = Chain(self._drafting, self._head.ids)
        # A chain also where a tree was asked for, and then of no more tokens than the tree's.
        for row in logits[: min(depth, self._drafting.size)]:
            if chain.add(row[None]) is None:
                break
        return chain.proposal()


class BlockProvider:
    """Makes and restores block heads."""

    name = "block"
    config_type = BlockConfig

    def create(
        self,
        config: BlockConfig,
        spec: CaptureSpec,
        anatomy: Anatomy,
        readout: TargetReadout,
        draft_token_ids: Tensor,
    ) -> BlockHead:
        return BlockHead(config, spec, anatomy, readout, draft_token_ids)

    def restore(
        self,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        spec: CaptureSpec,
        order: Sequence[int],
        anatomy: Anatomy,
        readout: TargetReadout,
    ) -> BlockHead:
        head = BlockHead(BlockConfig(**config), spec, anatomy, readout, tensors["ids"])
        back = [list(order).index(i) for i in range(len(spec))]
        columns = tensors["fc.weight"].unflatten(1, (len(spec), -1))
        head.load_state_dict({**tensors, "fc.weight": columns[:, back].flatten(1)})
        return head


def make_block_head(model: Any, anatomy: Anatomy, ids: Tensor, seed: int = 0, block: int = 3) -> BlockHead:
    """A random head for a model."""
    from capture_hooks.heads import readout_of

    spec = CaptureSpec.parse("post.-1, embed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = BlockHead(BlockConfig(block), spec, anatomy, readout_of(anatomy, spec), ids)
    return head.eval()
