"""The training objective against a slow reference written from its definition, in float64.

The reference shares no code with the head: one sequence at a time, one full run of all rows so far
per step under an explicit dense mask, complex-number RoPE, plain loops over rows for the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from capture_hooks_eagle3.config import Eagle3Config
from capture_hooks_eagle3.head import Eagle3Head
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from capture_hooks.heads.contract import StepSums, TargetReadout, TrainBatch
from capture_hooks.spec import CaptureSpec

EPS, THETA = 1e-5, 100.0


@dataclass(frozen=True)
class Case:
    config: Eagle3Config
    inputs: int
    hidden: int
    vocabulary: int
    draft: int
    lengths: tuple[int, ...]
    scale: float
    softcap: float | None
    with_argmax: bool
    seed: int


@st.composite
def cases(draw) -> Case:
    kv_heads = draw(st.sampled_from([1, 2]))
    inputs = draw(st.integers(1, 4))
    fc = draw(st.sampled_from(["plain", "before", "each"])) if inputs > 1 else "plain"
    vocabulary = draw(st.integers(5, 13))
    config = Eagle3Config(
        layers=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        intermediate_size=draw(st.sampled_from([3, 8])),
        rms_norm_eps=EPS,
        rope={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=64,
        norm_before_residual=draw(st.booleans()),
        norm_before_fc=fc == "before",
        fc_norm=fc == "each",
        norm_output=draw(st.booleans()),
        steps=draw(st.integers(1, 5)),
        step_decay=draw(st.sampled_from([0.5, 0.8, 1.0])),
        outside=draw(st.sampled_from(["skip", "renormalise"])),
        train_lm_head=draw(st.booleans()),
        train_embedding=draw(st.booleans()),
    )
    return Case(
        config,
        inputs,
        hidden=draw(st.sampled_from([4, 6])),
        vocabulary=vocabulary,
        draft=draw(st.integers(1, vocabulary)),
        lengths=tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))),
        scale=draw(st.sampled_from([1.0, 0.5])),
        softcap=draw(st.sampled_from([None, 3.0])),
        with_argmax=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def build(case: Case) -> tuple[Eagle3Head, TrainBatch, TargetReadout]:
    rng = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    ids = torch.randperm(case.vocabulary, generator=rng)[: case.draft].sort().values
    readout = TargetReadout(
        normal(case.vocabulary, case.hidden), normal(case.vocabulary), case.scale, case.softcap
    )
    spec = CaptureSpec.parse(", ".join(f"post.{i}" for i in range(case.inputs)))
    head = (
        Eagle3Head(case.config, spec, 8, normal(case.vocabulary, case.hidden), readout, ids).double().eval()
    )
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(normal(*parameter.shape) * 0.4 + (1.0 if parameter.ndim == 1 else 0.0))
        if case.inputs > 1:
            head.input_scale.copy_(normal(case.inputs * case.hidden).exp())
    total = sum(case.lengths)
    target = normal(total, case.hidden)
    batch = TrainBatch(
        states=normal(total, case.inputs * case.hidden),
        target=target,
        token_ids=torch.randint(case.vocabulary, (total,), generator=rng),
        loss_mask=torch.rand(total, generator=rng) < 0.7,
        starts=torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()]),
        argmax=readout.logits(target).argmax(-1) if case.with_argmax else None,
    )
    return head, batch, readout


class Reference:
    """The head from its weights alone."""

    def __init__(self, head: Eagle3Head, config: Eagle3Config, inputs: int) -> None:
        self.w = {k: v.detach().clone() for k, v in head.state_dict().items()}
        self.w.setdefault("embedding", head.embedding.detach().clone())
        self.leaves = [name for name, p in head.named_parameters() if p.requires_grad]
        for name in self.leaves:
            self.w[name].requires_grad_()
        self.c, self.inputs = config, inputs

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.w[name]

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        d = self.c.head_dim
        rates = torch.tensor([THETA ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
        turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None, None] * rates)
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    def layer(self, i: int, h: Tensor, embedded: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        p = f"layers.{i}."
        if i == 0:
            normed = self.norm(h, p + "hidden_norm.weight")
            x = torch.cat([self.norm(embedded, p + "input_layernorm.weight"), normed], -1)
            residual = normed if self.c.norm_before_residual else h
        else:
            x, residual = self.norm(h, p + "input_layernorm.weight"), h
        q, k, v = (
            (x @ self.w[f"{p}self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, self.c.head_dim))
            for n in "qkv"
        )
        q, k = self.rope(q, positions), self.rope(k, positions)
        group = self.c.heads // self.c.kv_heads
        mixed = []
        for head in range(self.c.heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(self.c.head_dim)
            mixed.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ v[:, head // group])
        x = residual + torch.cat(mixed, -1) @ self.w[p + "self_attn.o_proj.weight"].T
        y = self.norm(x, p + "post_attention_layernorm.weight")
        gate, up = (y @ self.w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        return x + (gate * torch.sigmoid(gate) * up) @ self.w[p + "mlp.down_proj.weight"].T

    def combine(self, g: Tensor) -> Tensor:
        if self.inputs == 1:
            return g
        if self.c.norm_before_fc:
            g = self.norm(g, "input_norm.weight")
        if self.c.fc_norm:
            chunks = g.chunk(self.inputs, -1)
            g = torch.cat([self.norm(x, f"fc_norm.{i}.weight") for i, x in enumerate(chunks)], -1)
        return (g * self.w["input_scale"]) @ self.w["fc.weight"].T

    def run(self, fed: list[Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (as fed back, as read by lm_head) of the last step, re-running every step's rows.

        ``fed[i]`` holds the input of step i's rows t = 0..; row t of step i eats token ids[t + 1 + i].
        """
        marks = [(i, t) for i, h in enumerate(fed) for t in range(h.shape[0])]
        sees = torch.tensor(
            [[(s == 0 and u <= t) or (u == t and s <= i) for s, u in marks] for i, t in marks]
        )
        positions = torch.tensor([t + i for i, t in marks])
        embedded = self.w["embedding"][torch.tensor([int(ids[t + 1 + i]) for i, t in marks])]
        h = torch.cat(fed)
        for i in range(self.c.layers):
            h = self.layer(i, h, embedded, positions, sees)
        h = h[-fed[-1].shape[0] :]
        normed = self.norm(h, "norm.weight")
        return (normed if self.c.norm_output else h), normed

    def sums(self, batch: TrainBatch, readout: TargetReadout) -> StepSums:
        steps, ids_of_draft = self.c.steps, self.w["draft_ids"].tolist()
        loss, weight, hits, rows = ([torch.zeros((), dtype=torch.float64)] * steps for _ in range(4))
        for start, end in zip(batch.starts.tolist(), batch.starts.tolist()[1:], strict=False):
            ids, mask, length = batch.token_ids[start:end], batch.loss_mask[start:end], end - start
            logits = batch.target[start:end] @ readout.weight.T + readout.bias
            logits = logits * readout.scale
            if readout.softcap is not None:
                logits = readout.softcap * torch.tanh(logits / readout.softcap)
            fed = [self.combine(batch.states[start:end])[: max(length - 1, 0)]]
            for j in range(steps):
                fed[-1] = fed[-1][: max(length - 1 - j, 0)]
                if fed[-1].shape[0] == 0:
                    break
                back, normed = self.run(fed, ids)
                for t in range(length - 2 - j):
                    if not mask[t + 2 + j]:
                        continue
                    teacher = logits[t + 1 + j]
                    p = teacher[ids_of_draft].softmax(-1)
                    greedy = int(teacher.argmax())
                    log_q = (self.w["lm_head.weight"] @ normed[t]).log_softmax(-1)
                    rows[j] = rows[j] + 1
                    hits[j] = hits[j] + (ids_of_draft[int(log_q.argmax())] == greedy)
                    if greedy in ids_of_draft or self.c.outside == "renormalise":
                        loss[j] = loss[j] - (p * log_q).sum()
                        weight[j] = weight[j] + 1
                fed.append(back)
        factors = torch.tensor([self.c.step_decay**j for j in range(steps)], dtype=torch.float64)
        return StepSums(*(torch.stack(x) for x in (loss, weight, hits, rows)), factors)


def check(case: Case) -> None:
    head, batch, readout = build(case)
    reference = Reference(head, case.config, case.inputs)
    found, wanted = head(batch), reference.sums(batch, readout)
    for name in ("loss", "weight", "hits", "rows", "factors"):
        torch.testing.assert_close(
            getattr(found, name),
            getattr(wanted, name),
            rtol=1e-9,
            atol=1e-9,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    uneven = torch.linspace(
        1, 2, case.config.steps, dtype=torch.float64
    )  # not the factors: any upstream gradient
    ((found.loss * uneven).sum() + 0 * found.mean()).backward()
    total = (wanted.loss * uneven).sum()
    if not total.requires_grad:  # nothing counts: the head's gradients must still exist, all zero
        assert all(p.grad is not None and not p.grad.any() for p in head.parameters() if p.requires_grad)
        return
    gradients = torch.autograd.grad(total, [reference.w[n] for n in reference.leaves], allow_unused=True)
    for name, gradient in zip(reference.leaves, gradients, strict=True):
        own = head.get_parameter(name).grad
        want = torch.zeros_like(own) if gradient is None else gradient
        torch.testing.assert_close(own, want, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@settings(max_examples=120, deadline=None, derandomize=True)
@given(case=cases())
def test_loss_and_gradients_equal_the_slow_reference(case: Case) -> None:
    check(case)


LONG = Case(
    Eagle3Config(
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=4,
        intermediate_size=8,
        rms_norm_eps=EPS,
        rope={"rope_type": "default", "rope_theta": THETA},
        max_position_embeddings=64,
        steps=4,
        train_lm_head=True,
    ),
    inputs=3,
    hidden=6,
    vocabulary=11,
    draft=7,
    lengths=(40, 3, 25),
    scale=1.0,
    softcap=None,
    with_argmax=False,
    seed=3,
)


@pytest.mark.parametrize("outside", ["skip", "renormalise"])
def test_small_blocks_and_chunks_change_nothing(outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with attention blocks of a few rows and loss chunks of two rows."""
    from capture_hooks_eagle3 import head as module

    make_plan = module.make_plan

    def small(*args: object, **kwargs: object) -> object:
        return make_plan(*args, **{**kwargs, "score_budget": 50, "chunk": 2})

    monkeypatch.setattr(module, "make_plan", small)
    check(replace(LONG, config=replace(LONG.config, outside=outside)))
    check(replace(LONG, config=replace(LONG.config, outside=outside, train_lm_head=False)))


@pytest.mark.parametrize("train_lm_head", [False, True])
def test_a_head_in_float32_learns_from_a_target_in_float64(train_lm_head: bool) -> None:
    case = replace(LONG, config=replace(LONG.config, train_lm_head=train_lm_head))
    found = []
    for dtype in (torch.float64, torch.float32):
        head, batch, _ = build(case)
        for parameter in head.parameters():
            parameter.data = parameter.data.to(dtype)
        sums = head(batch)
        sums.mean().backward()
        grads = [p.grad.double().flatten() for p in head.parameters() if p.grad is not None]
        found.append((sums.loss.detach().double(), torch.cat(grads)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
