"""The trainer itself: the loss over the global batch, exact resume, and what a checkpoint holds."""

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from capture_hooks.errors import TrainingError
from capture_hooks.heads.contract import TrainBatch
from capture_hooks.training.data import WindowDataset, pack, windows
from capture_hooks.training.objective import Objective, supervised_rows, trainable_names
from capture_hooks.training.trainer import checkpoints


def state(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def sums(head, pieces):
    return head(TrainBatch(**pack(pieces)))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), order=st.randoms(use_true_random=False))
def test_packing_lets_no_sequence_see_another(linear_head, memory, seed, order):
    """Sums over a packed batch are the sums of its sequences one by one, in any order."""
    pieces = memory(7, seed, torch.float64).pieces
    head = linear_head(dtype=torch.float64)
    alone = [sums(head, [piece]) for piece in pieces]
    order.shuffle(pieces)
    together = sums(head, pieces)
    for name in ("loss", "weight", "hits", "rows"):
        torch.testing.assert_close(
            getattr(together, name), sum(getattr(one, name) for one in alone), rtol=1e-12, atol=1e-12
        )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
def test_the_normaliser_counts_rows_scored_at_step_0(masks):
    starts = torch.tensor([0] + [len(mask) for mask in masks]).cumsum(0)
    mask = torch.tensor([bit for mask in masks for bit in mask])
    assert int(supervised_rows(mask, starts)) == sum(sum(mask[2:]) for mask in masks)


def test_the_normaliser_is_what_a_head_counts(linear_head, memory):
    pieces = memory(9).pieces
    packed = pack(pieces)
    assert sums(linear_head(), pieces).rows[0] == supervised_rows(packed["loss_mask"], packed["starts"])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 99), longest=st.integers(3, 40))
def test_windows_cover_everything_that_can_be_learnt(memory, seed, longest):
    sequences = memory(6, seed)
    pieces = windows(sequences, range(6), longest)
    taken = {(p.sequence, t) for p in pieces for t in range(p.start, p.stop)}
    assert len(taken) == sum(p.length for p in pieces)
    assert all(0 < p.length <= longest for p in pieces)
    for index in range(6):
        mask = sequences.tokens(index)[1].tolist()
        for t in range(len(mask)):
            if mask[t] and t % longest >= 2:
                assert (index, t) in taken


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_gives_the_loss_and_weights_of_one_pass(
    linear_head, memory, trainer_for, tmp_path, accumulate
):
    def run(accumulate):
        head = linear_head(dtype=torch.float64)
        trainer = trainer_for(
            head, memory(24, dtype=torch.float64), directory=tmp_path / str(accumulate), accumulate=accumulate
        )
        trainer.train()
        return state(head), [line for line in trainer.state.log_history if "learning_rate" in line]

    (one, lines), (many, others) = run(1), run(accumulate)
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=1e-9, atol=1e-12)
    for line, other in zip(lines, others, strict=True):
        for name in line:
            if name != "elapsed":
                # Trainer keeps its own running loss in float32.
                assert other[name] == pytest.approx(line[name], rel=1e-6 if name == "loss" else 1e-9), name


def test_the_first_logged_loss_is_the_definition(linear_head, memory, trainer_for):
    head, sequences = linear_head(dtype=torch.float64), memory(24, dtype=torch.float64)
    trainer = trainer_for(head, sequences, accumulate=2, steps=1)
    batches = [
        trainer.train_dataset[i] for part in trainer.get_train_dataloader().batch_sampler for i in part
    ]
    with torch.no_grad():
        whole = sums(linear_head(dtype=torch.float64), batches)
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(float((whole.factors * whole.loss).sum() / whole.rows[0]), rel=1e-6)
    for j in range(2):
        assert line[f"acceptance_{j + 1}"] == pytest.approx(float(whole.hits[j] / whole.rows[j]))
        assert line[f"loss_{j + 1}"] == pytest.approx(float(whole.loss[j] / whole.weight[j]), rel=1e-6)


@pytest.mark.parametrize("ema", [None, 0.9])
@pytest.mark.parametrize("at", [1, 4])
def test_a_resumed_run_ends_at_the_same_bits(linear_head, memory, trainer_for, tmp_path, ema, at):
    """With noise drawn in every step, so that the random state counts too."""

    def trainer(directory):
        head = linear_head(noise=0.3)
        made = trainer_for(head, memory(), directory=directory, save_steps=at, ema=ema, accumulate=2)
        return head, made

    head, whole = trainer(tmp_path / "whole")
    whole.train()
    torch.rand(11)  # the random state of the second process is another
    again, resumed = trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{at}"))
    assert resumed.state.global_step == whole.state.global_step == 6
    assert equal(state(again), state(head))
    if ema:
        assert equal(resumed.average.state_dict(), whole.average.state_dict())
        assert not equal(whole.average.state_dict(), {**state(head)})


def test_a_timed_run_resumes_at_the_same_bits(linear_head, memory, trainer_for, tmp_path):
    def run(directory, checkpoint=None):
        head = linear_head(noise=0.3)
        trainer = trainer_for(
            head,
            memory(),
            directory=directory,
            steps=500,
            seconds=9.5,
            now=itertools.count().__next__,
            save_steps=4,
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        rates = {h["step"]: h["learning_rate"] for h in trainer.state.log_history if "learning_rate" in h}
        return state(head), rates

    whole, rates = run(tmp_path / "whole")
    assert max(rates) == 10  # the first step that ends at or after 9.5 seconds
    again, others = run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-4"))
    assert others == rates
    assert equal(again, whole)


def test_a_checkpoint_holds_only_the_heads_own_state(linear_head, memory, trainer_for, tmp_path):
    head = linear_head()
    trainer_for(head, memory(), save_steps=6).train()
    saved = load_file(tmp_path / "run" / "checkpoint-6" / "model.safetensors")
    assert set(saved) == {"head.fc", "head.mix", "head.scale"} == trainable_names(Objective(head))
    assert torch.equal(saved["head.fc"], head.fc)


def test_checkpoints_are_whole_and_few(linear_head, memory, trainer_for, tmp_path):
    trainer_for(linear_head(), memory(), save_steps=1, keep=2).train()
    run = tmp_path / "run"
    assert [path.name for path in checkpoints(run)] == ["checkpoint-5", "checkpoint-6"]
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-5", "checkpoint-6"]
    (run / "checkpoint-6" / "trainer_state.json").unlink()
    assert [path.name for path in checkpoints(run)] == ["checkpoint-5"]


def test_evaluation_sums_over_all_rows(linear_head, memory, trainer_for):
    sequences = memory(13, seed=5)
    held_out = WindowDataset(sequences, windows(sequences, range(13), 40))
    head = linear_head(noise=0.5)
    metrics = trainer_for(head, memory(), held_out=held_out, batch_tokens=45).evaluate()
    with torch.no_grad():
        whole = sums(head.eval(), [held_out[i] for i in range(len(held_out))])
    for j in range(2):
        assert metrics[f"eval_acceptance_{j + 1}"] == pytest.approx(float(whole.hits[j] / whole.rows[j]))
        assert metrics[f"eval_loss_{j + 1}"] == pytest.approx(
            float(whole.loss[j] / whole.weight[j]), rel=1e-5
        )


def test_evaluation_is_spread_over_the_run_and_comes_last(linear_head, memory, trainer_for):
    sequences = memory(5, seed=3)
    held_out = WindowDataset(sequences, windows(sequences, range(5), 40))
    trainer = trainer_for(linear_head(), memory(), held_out=held_out, evaluations=3)
    trainer.train()
    assert [h["step"] for h in trainer.state.log_history if "eval_loss" in h] == [2, 4, 6]


def test_the_average_is_what_is_evaluated(linear_head, memory, trainer_for):
    sequences = memory(5, seed=3)
    held_out = WindowDataset(sequences, windows(sequences, range(5), 40))
    head = linear_head()
    trainer = trainer_for(head, memory(), held_out=held_out, evaluations=1, ema=0.9)
    trainer.train()
    weights = state(head)
    trainer.average.swap()
    with torch.no_grad():
        averaged = sums(head.eval(), [held_out[i] for i in range(5)])
    assert trainer.state.log_history[-2]["eval_loss"] == pytest.approx(
        float(averaged.loss[0] / averaged.weight[0]), rel=1e-5
    )
    trainer.average.swap()
    assert equal(state(head), weights)


def test_the_average_follows_its_definition(linear_head, memory, trainer_for, tmp_path):
    trainer = trainer_for(linear_head(), memory(), save_steps=1, ema=0.5, steps=2)
    expected = linear_head().fc.detach().double()
    trainer.train()
    for step in (1, 2):
        decay = min(0.5, (1 + step) / (10 + step))
        weight = load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")["head.fc"].double()
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(trainer.average.average["head.fc"].double(), expected, rtol=1e-6, atol=1e-7)


def test_a_loss_that_is_not_finite_stops_the_run(linear_head, memory, trainer_for):
    head = linear_head()
    with torch.no_grad():
        head.fc[0, 0] = math.nan
    with pytest.raises(TrainingError, match="the loss became nan before step 1"):
        trainer_for(head, memory()).train()


def test_a_checkpoint_of_another_head_is_refused(linear_head, memory, trainer_for, tmp_path):
    trainer_for(linear_head(), memory(), save_steps=6).train()
    other = linear_head()
    other.extra = torch.nn.Parameter(torch.zeros(2))
    trainer = trainer_for(other, memory(), directory=tmp_path / "other")
    with pytest.raises(TrainingError, match=r"of another head: missing head\.extra"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))


def test_the_trainer_state_is_plain_json(linear_head, memory, trainer_for, tmp_path):
    trainer_for(linear_head(), memory(), save_steps=6).train()
    found = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text())
    assert found["global_step"] == 6
