"""The contract of a `HeadProvider` and its `DraftHead`: what it trains is what it drafts, saved or not."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...capture import Anatomy, bind, find_anatomy
from ...heads import (
    DraftHead,
    HeadProvider,
    TargetReadout,
    TrainBatch,
    load_head,
    make_witness,
    readout_of,
    save_head,
)
from ...heads.drafting import Drafting, Proposal, StepwiseHead, TreeShape
from ...spec import CaptureSpec
from .. import tiny

if TYPE_CHECKING:
    from pathlib import Path

_LENGTHS = (31, 1, 40, 2)  # of the packed sequences; some too short to teach anything
_DEPTH = 4  # tokens asked for
_SEED = 24  # of sampled proposals


class HeadContract:
    """Subclass and override `provider`, and what else your head needs.

    Everything is computed in float64 on a tiny random Llama, so that "the same" leaves room for another
    order of sums and for nothing else.
    """

    def provider(self) -> HeadProvider:
        """The provider under test."""
        raise NotImplementedError

    def config(self) -> Any:
        """Settings for `HeadProvider.create`, small, without randomness outside of training."""
        return self.provider().config_type()

    def spec(self) -> CaptureSpec:
        """The head's input; deliberately not in order of depth, and longer than one."""
        return CaptureSpec.parse("post.3, embed, post.1")

    def target(self) -> nn.Module:
        """The target; built afresh for each test."""
        return tiny.llama().double()

    def test_it_has_a_name_and_a_config_type(self) -> None:
        """Both are written into checkpoints."""
        provider = self.provider()
        assert provider.name
        assert isinstance(provider.config_type, type)
        bench = self._bench()
        assert bench.head.name == provider.name
        assert bench.head.target_layers == bench.anatomy.n_layers
        assert bench.head.spec == self.spec().absolute(bench.anatomy.n_layers)

    def test_draft_tokens_are_ascending_target_tokens(self) -> None:
        """What a head proposes, it proposes of `draft_token_ids`, as ids of the target."""
        bench = self._bench()
        bench.disturb()
        ids = bench.head.draft_token_ids
        assert ids.dtype == torch.int64
        assert torch.equal(ids, bench.draft_token_ids)
        assert bool((ids.diff() > 0).all())
        proposed = {token for rows in range(1, 30) for token in bench.proposal(bench.head, rows).tokens}
        assert proposed
        assert proposed <= set(ids.tolist())

    def test_the_loss_is_finite_and_every_weight_learns(self) -> None:
        """Each trainable weight gets a finite gradient, not all zero; the target's own weights get none."""
        bench = self._bench()
        frozen = list(bench.model.parameters())
        for parameter in frozen:
            parameter.requires_grad_(True)
        sums = bench.head.train()(bench.batch())
        loss = sums.mean()
        assert loss.ndim == 0
        assert bool(loss.isfinite())
        assert float(loss.detach()) > 0
        loss.backward()
        trainable = [(name, p) for name, p in bench.head.named_parameters() if p.requires_grad]
        trainable = [(name, p) for name, p in trainable if not any(p is f for f in frozen)]
        assert trainable, "nothing learns"
        for name, parameter in trainable:
            assert parameter.grad is not None, f"{name} is trainable and no part of the loss"
            assert bool(parameter.grad.isfinite().all()), f"{name} gets a gradient that is not finite"
            assert bool((parameter.grad != 0).any()), f"{name} gets a gradient of zeros"
        assert all(parameter.grad is None for parameter in frozen), "the target's weights get a gradient"

    def test_the_mask_selects_what_is_learned(self) -> None:
        """Rows count by the mask of the token they predict; without any, the loss is zero and not NaN."""
        bench = self._bench()
        batch = bench.batch()
        sums = bench.head(batch)
        for j in range(len(sums.rows)):
            assert int(sums.rows[j]) == len(bench.scored(batch, j)), f"step {j}"
        with torch.no_grad():
            nothing = bench.head(dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
        assert float(nothing.rows.sum()) == float(nothing.weight.sum()) == float(nothing.loss.sum()) == 0
        assert float(nothing.mean()) == 0

    def test_packed_sequences_do_not_see_each_other(self) -> None:
        """The sums over a packed batch are the sums over its sequences, one at a time."""
        bench = self._bench()
        batch = bench.batch()
        together = bench.head(batch)
        apart = [bench.head(bench.alone(batch, s)) for s in range(len(_LENGTHS))]
        for field in ("loss", "weight", "hits", "rows"):
            total = torch.stack([getattr(sums, field) for sums in apart]).sum(0)
            torch.testing.assert_close(
                getattr(together, field).double(), total.double(), rtol=1e-9, atol=1e-12
            )

    def test_the_first_token_proposed_is_the_one_training_scored(self) -> None:
        """Propose after every row: the hits of training at position 0 are counted again, exactly.

        The batch's greedy tokens are set from the drafts themselves for about half of the rows, so that
        one row computed otherwise changes the count.
        """
        bench = self._bench()
        bench.disturb(4.0)  # sharp attention: a draft then depends on where each row stands
        batch = bench.batch()
        drafts = {}
        for a, b in itertools.pairwise(batch.starts.tolist()):
            drafter = bench.head.drafter(b - a + _DEPTH, Drafting(_DEPTH))
            for t in range(a, b - 2):
                drafter.accept(batch.states[t : t + 1], batch.token_ids[t + 1 : t + 2])
                drafts[t, 0] = drafter.propose(_DEPTH).tokens[0]
        bench.check_hits(drafts, batch, steps=1)

    def test_committed_rows_come_in_pieces_and_drafts_leave_no_trace(self) -> None:
        """A proposal is the same whatever was proposed before, and however its rows came."""
        bench = self._bench()
        bench.disturb(4.0)
        drafting = Drafting(_DEPTH, warp=_softmax)
        whole = bench.proposal(bench.head, 12)
        generator = torch.Generator()
        drafter = bench.head.drafter(32, dataclasses.replace(drafting, generator=generator))
        for start, end, depth in ((0, 1, 1), (1, 6, _DEPTH), (6, 7, 2), (7, 12, _DEPTH)):
            drafter.accept(bench.states[start:end], bench.token_ids[start + 1 : end + 1])
            generator.manual_seed(_SEED)
            pieces = drafter.propose(depth)
        _assert_same(pieces, whole, rtol=1e-9, atol=1e-12)

    def test_proposals_keep_to_what_is_asked(self) -> None:
        """Depth, tree and confidence bound them; where a head samples, tokens come of the distributions."""
        bench = self._bench()
        bench.disturb()
        column = {token: at for at, token in enumerate(bench.head.draft_token_ids.tolist())}
        for tree, least, warp in itertools.product(
            (None, TreeShape(3, 2, 4), TreeShape(2, 3, 1)), (0.0, 1e-3, 0.999999), (None, _softmax)
        ):
            depth = _DEPTH if tree is None else tree.depth
            generator = torch.Generator().manual_seed(_SEED)
            drafting = Drafting(depth, tree, least, warp if tree is None else None, generator)
            drafter = bench.head.drafter(16, drafting)
            for asked in range(1, depth + 1):
                drafter.accept(bench.states[asked : asked + 1], bench.token_ids[asked + 1 : asked + 2])
                proposal = drafter.propose(asked)
                assert len(proposal.tokens) == len(proposal.parents) <= drafting.size
                assert all(0 <= parent < node for node, parent in enumerate(proposal.parents, 1))
                assert max(proposal.depths()) <= asked
                assert least < 0.9 or not proposal.tokens, "a random head is not so sure"
                siblings = set(zip(proposal.parents, proposal.tokens, strict=True))
                assert len(siblings) == len(proposal.tokens), "one token twice behind the same node"
                if proposal.probabilities is None:
                    continue
                assert drafting.warp is not None, "sampled, and was not asked to"
                assert proposal.is_chain
                assert proposal.probabilities.shape == (len(proposal.tokens), len(column))
                total = proposal.probabilities.sum(-1)
                torch.testing.assert_close(total, torch.ones_like(total))
                chances = [q[column[t]] for q, t in zip(proposal.probabilities, proposal.tokens, strict=True)]
                assert all(chance > 0 for chance in chances)

    def test_export_and_restore_give_the_same_head(self) -> None:
        """In any order of the file's inputs, and with weights that are no longer the initial ones."""
        bench = self._bench()
        bench.disturb()
        expected = bench.proposal(bench.head, 8)
        loss = bench.head(bench.batch()).loss
        for order in itertools.permutations(range(len(bench.head.spec))):
            tensors, fields = bench.head.export(order)
            again = self.provider().restore(
                tensors, fields, bench.head.spec, order, bench.anatomy, bench.readout
            )
            again = again.double().eval()
            assert again.spec == bench.head.spec
            assert torch.equal(again.draft_token_ids, bench.head.draft_token_ids)
            _assert_same(bench.proposal(again, 8), expected, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(again(bench.batch()).loss, loss, rtol=1e-6, atol=1e-6)

    def test_a_saved_head_loads(self, tmp_path: Path) -> None:
        """Through `save_head` and `load_head`: files, consistency checks and witness included."""
        bench = self._bench()
        bench.disturb()
        witness = make_witness(bench.model, bench.head.spec, [bench.token_ids[:12].tolist()])
        save_head(bench.head, tmp_path / "head", model=bench.model, witness=witness)
        again = load_head(tmp_path / "head", bench.model).double().eval()
        _assert_same(bench.proposal(again, 8), bench.proposal(bench.head, 8), rtol=1e-6, atol=1e-6)

    def _bench(self) -> _Bench:
        return _Bench(self.provider(), self.config(), self.spec(), self.target())


class StepwiseHeadContract(HeadContract):
    """The contract of a head that drafts a token at a step (`capture_hooks.heads.drafting.StepwiseHead`)."""

    def test_drafting_computes_what_training_scored(self) -> None:
        """Draft every row with ``extend`` and ``step``: the hits of training are counted again, exactly."""
        bench = self._bench()
        bench.disturb(4.0)  # sharp attention: a draft then depends on where each row stands
        batch = bench.batch()
        steps = len(bench.head(batch).rows)
        bench.check_hits(_stepwise_drafts(self._steps(bench), batch, steps), batch, steps)

    def test_a_cache_can_be_filled_in_pieces_and_rolled_back(self) -> None:
        """Rows are the same however they are appended, and drafted rows leave no trace."""
        bench = self._bench()
        head = self._steps(bench)
        states, ids = bench.states[:12], bench.token_ids[1:13]
        whole = head.extend(head.new_cache(32), states, ids, 0)
        cache = head.new_cache(32)
        pieces = []
        for start, end in ((0, 1), (1, 6), (6, 7), (7, 12)):
            hidden = head.extend(cache, states[start:end], ids[start:end], start)
            pieces.append(hidden)
            draft = head.step(cache, hidden[-1:], ids[end - 1 : end], torch.tensor([end]))
            head.step(cache, draft, ids[:1], torch.tensor([end + 1]))
        torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-9, atol=1e-12)

    def test_a_tree_drafts_what_its_branches_draft_alone(self) -> None:
        """Two siblings appended at once, each masked from the other, are the rows each alone would be."""
        bench = self._bench()
        head = self._steps(bench)
        n, ids = 7, bench.token_ids
        cache = head.new_cache(32)
        parent = head.extend(cache, bench.states[:n], ids[1 : n + 1], 0)[-1:]
        mask = torch.ones(2, n + 2, dtype=torch.bool)
        mask[0, n + 1] = mask[1, n] = False
        both = head.step(cache, parent.repeat(2, 1), ids[:2], torch.tensor([n, n]), mask)
        for k in range(2):
            alone = head.new_cache(32)
            head.extend(alone, bench.states[:n], ids[1 : n + 1], 0)
            one = head.step(alone, parent, ids[k : k + 1], torch.tensor([n]))
            torch.testing.assert_close(both[k : k + 1], one, rtol=1e-9, atol=1e-12)

    @staticmethod
    def _steps(bench: _Bench) -> StepwiseHead:
        head: Any = bench.head  # what else it has, its author says by subclassing this contract
        return head  # type: ignore[no-any-return]  # see above


class _Bench:
    """A head on a tiny target, and what a batch of random tokens gives there."""

    def __init__(self, provider: HeadProvider, config: Any, spec: CaptureSpec, model: nn.Module) -> None:
        self.model = model.eval()
        self.anatomy: Anatomy = find_anatomy(model)
        spec = spec.absolute(self.anatomy.n_layers)
        self.readout: TargetReadout = readout_of(self.anatomy, spec)
        generator = torch.Generator().manual_seed(20)
        vocab = self.anatomy.vocab_size
        self.draft_token_ids = torch.randperm(vocab, generator=generator)[: vocab // 4 * 2].sort().values
        torch.manual_seed(21)
        self.head: DraftHead = provider.create(config, spec, self.anatomy, self.readout, self.draft_token_ids)
        self.head.double().eval()
        self.token_ids = torch.randint(0, vocab, (sum(_LENGTHS),), generator=generator)
        self.loss_mask = torch.rand(sum(_LENGTHS), generator=generator) < 0.7
        inputs, targets = [], []
        for ids in torch.split(self.token_ids, list(_LENGTHS)):
            with torch.no_grad(), bind(model, spec, target=True) as capture:
                model(input_ids=ids[None], use_cache=False)
            inputs.append(capture.states.packed)
            targets.append(capture.states.target)
        self.states, self.targets = torch.cat(inputs), torch.cat(targets)

    def batch(self) -> TrainBatch:
        starts = torch.tensor([0, *_LENGTHS]).cumsum(0)
        return TrainBatch(self.states, self.targets, self.token_ids, self.loss_mask, starts)

    def alone(self, batch: TrainBatch, sequence: int) -> TrainBatch:
        a, b = batch.starts[sequence : sequence + 2].tolist()
        fields = ("states", "target", "token_ids", "loss_mask")
        cut = {field: getattr(batch, field)[a:b] for field in fields}
        return dataclasses.replace(batch, **cut, starts=torch.tensor([0, b - a]))

    def scored(self, batch: TrainBatch, j: int) -> list[int]:
        """Rows t that count at step j: their sequence has x[t+2+j], and the mask selects it."""
        bounds = itertools.pairwise(batch.starts.tolist())
        return [t for a, b in bounds for t in range(a, b - 2 - j) if bool(batch.loss_mask[t + 2 + j])]

    def proposal(self, head: DraftHead, rows: int) -> Proposal:
        """What a head proposes after the first ``rows`` tokens; sampled where it samples."""
        drafting = Drafting(_DEPTH, warp=_softmax, generator=torch.Generator().manual_seed(_SEED))
        drafter = head.drafter(rows + _DEPTH, drafting)
        with torch.no_grad():
            drafter.accept(self.states[:rows], self.token_ids[1 : rows + 1])
            return drafter.propose(_DEPTH)

    def check_hits(self, drafts: dict[tuple[int, int], int], batch: TrainBatch, steps: int) -> None:
        """Training counts as hits the tokens drafted (row, position) that the target says too."""
        greedy = self.greedy_from(drafts, batch)
        sums = self.head(dataclasses.replace(batch, argmax=greedy))
        for j in range(steps):
            rows = self.scored(batch, j)
            hits = sum(drafts[t, j] == int(greedy[t + 1 + j]) for t in rows)
            assert int(sums.hits[j]) == hits, (
                f"position {j}: training counts {int(sums.hits[j])} hits, drafting {hits}"
            )
            assert j > 0 or 0 < hits < len(rows), "the test would not notice a difference"

    def greedy_from(self, drafts: dict[tuple[int, int], int], batch: TrainBatch) -> Tensor:
        """Greedy target tokens of which about half are what some row drafted for that place."""
        generator = torch.Generator().manual_seed(22)
        greedy = torch.randint(0, self.anatomy.vocab_size, batch.token_ids.shape, generator=generator)
        for (t, j), token in sorted(drafts.items()):
            if t + 1 + j < len(greedy) and float(torch.rand((), generator=generator)) < 0.5:
                greedy[t + 1 + j] = token
        return greedy

    def disturb(self, factor: float = 1.0) -> None:
        """Give every trainable weight another value; matrices are multiplied by ``factor`` as well."""
        generator = torch.Generator().manual_seed(23)
        with torch.no_grad():
            for parameter in self.head.parameters():
                if parameter.requires_grad and not any(parameter is p for p in self.model.parameters()):
                    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    parameter.add_(noise, alpha=0.02)
                    if parameter.ndim > 1:
                        parameter.mul_(factor)


def _stepwise_drafts(head: StepwiseHead, batch: TrainBatch, steps: int) -> dict[tuple[int, int], int]:
    """The token drafted by each row at each step, the way a server drafts, but along the true tokens."""
    found: dict[tuple[int, int], int] = {}
    for a, b in itertools.pairwise(batch.starts.tolist()):
        for t in range(a, b - 2):
            cache = head.new_cache(b - a + steps)
            rows = slice(a, t + 1)
            hidden = head.extend(cache, batch.states[rows], batch.token_ids[a + 1 : t + 2], 0)[-1:]
            for j in range(steps):
                found[t, j] = int(head.draft_token_ids[head.logits(hidden.detach()).argmax(-1)])
                if t + 2 + j >= b:
                    break
                ids = batch.token_ids[t + 2 + j : t + 3 + j]
                hidden = head.step(cache, hidden, ids, torch.tensor([t - a + 1 + j]))
    return found


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _assert_same(ours: Proposal, theirs: Proposal, *, rtol: float, atol: float) -> None:
    assert (ours.tokens, ours.parents) == (theirs.tokens, theirs.parents)
    assert (ours.probabilities is None) == (theirs.probabilities is None)
    if ours.probabilities is not None:
        torch.testing.assert_close(ours.probabilities, theirs.probabilities, rtol=rtol, atol=atol)
