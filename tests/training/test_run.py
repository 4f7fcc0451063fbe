"""Whole runs with the EAGLE-3 head: offline and online, interrupted, and on two processes."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from capture_hooks.errors import CaptureHooksError, DataError, HeadError, StoreError, TrainingError
from capture_hooks.heads import load_head
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, ModelStates, write_dump
from capture_hooks.training import TrainConfig, TrainingInterrupted, run_directory, train
from capture_hooks.training.build import prepare

WORKER = Path(__file__).with_name("run_worker.py")
_spec = importlib.util.spec_from_file_location("training_run_worker", WORKER)
work = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(work)


@pytest.fixture(scope="module")
def target():
    return work.target()


@pytest.fixture(scope="module")
def dump(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dumps") / "dump"
    write_dump(ModelStates(target, CaptureSpec.parse(work.SPEC), work.examples()), directory)
    return Dump.open(directory)


@pytest.fixture(scope="module")
def uninterrupted(target, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "head"
    train(target, work.examples(), work.config(), out=out)
    return out


def weights(out):
    return load_file(out / "model.safetensors")


def lines(out, key="learning_rate"):
    text = (run_directory(out) / "log.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, text) if key in entry]


def assert_same_bits(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_leaves_a_head_that_loads_and_a_log(uninterrupted, target):
    head = load_head(uninterrupted, target)
    assert head.name == "eagle3"
    assert str(head.spec) == work.SPEC
    assert [entry["step"] for entry in lines(uninterrupted)] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in lines(uninterrupted, "eval_loss")] == [3, 6]


def test_the_targets_weights_are_neither_touched_nor_copied(uninterrupted, target):
    fresh = work.target()
    assert_same_bits(dict(target.state_dict()), dict(fresh.state_dict()))
    checkpoint = load_file(run_directory(uninterrupted) / "checkpoint-6" / "model.safetensors")
    for name, tensor in checkpoint.items():
        for theirs in fresh.state_dict().values():
            assert tensor.shape != theirs.shape or not torch.equal(tensor, theirs), name
    assert not any("embed" in name or "target" in name for name in checkpoint)


def test_offline_and_online_are_the_same_training(uninterrupted, target, dump, tmp_path):
    train(target, dump, work.config(), out=tmp_path / "head")
    for key in ("learning_rate", "eval_loss"):
        for offline, online in zip(lines(tmp_path / "head", key), lines(uninterrupted, key), strict=True):
            for name in offline.keys() - {"elapsed"}:
                assert offline[name] == pytest.approx(online[name], rel=2e-4, abs=1e-6), name
    ours, theirs = weights(tmp_path / "head"), weights(uninterrupted)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def test_windows_see_the_same_states_online_as_offline(target, dump):
    """A piece that begins in the middle of a sequence still knows what came before it."""
    config = work.config(max_length=10)
    offline, online = prepare(target, dump, config), prepare(target, work.examples(), config)
    from capture_hooks.training.data import pack

    assert any(piece.start for piece in offline.train.pieces)
    stored = pack([offline.train[i] for i in range(len(offline.train))])
    live = online.capture(pack([online.train[i] for i in range(len(online.train))]))
    for name in ("token_ids", "loss_mask", "starts"):
        assert torch.equal(stored[name], live[name])
    for name in ("states", "target"):
        torch.testing.assert_close(live[name], stored[name], rtol=1e-4, atol=1e-4)


class StopAt:
    """Presses Ctrl-C at a step."""

    def __init__(self, step):
        self.step = step

    def estimated(self, estimate):
        assert estimate.steps == 6
        assert 0 < estimate.coverage <= 1

    def logged(self, values):
        if values["step"] == self.step and "learning_rate" in values:
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_saves_and_the_resumed_run_ends_at_the_same_bits(uninterrupted, target, tmp_path):
    out = tmp_path / "head"
    with pytest.raises(TrainingInterrupted, match="stopped after step 4"):
        train(target, work.examples(), work.config(), out=out, reporter=StopAt(3))
    assert not out.exists()
    with pytest.raises(TrainingError, match=r"holds an unfinished run \(step 4\)"):
        train(target, work.examples(), work.config(), out=out)
    train(target, work.examples(), work.config(), out=out, resume=True)
    assert_same_bits(weights(out), weights(uninterrupted))
    assert [entry["step"] for entry in lines(out)] == [1, 2, 3, 4, 5, 6]


def test_a_killed_process_resumes_at_the_same_bits(uninterrupted, target, tmp_path):
    out = tmp_path / "head"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, WORKER, tmp_path, "hold"], env=environment)
    log = run_directory(out) / "log.jsonl"
    until = time.monotonic() + 300
    while not (log.exists() and '"step": 5' in log.read_text()):
        assert process.poll() is None
        assert time.monotonic() < until, "the run did not reach step 5"
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not out.exists()
    train(target, work.examples(), work.config(), out=out, resume=True)
    assert_same_bits(weights(out), weights(uninterrupted))


def test_two_processes_train_what_one_does(target, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, WORKER, tmp_path, "train"], env=environment, check=True, timeout=300)
    alone = tmp_path / "alone"
    train(target, work.examples(), work.config(head_config={"steps": 2, "feature_noise": 0.0}), out=alone)
    for key in ("learning_rate", "eval_loss"):
        for two, one in zip(lines(tmp_path / "head", key), lines(alone, key), strict=True):
            for name in one.keys() - {"elapsed"}:
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    ours, theirs = weights(tmp_path / "head"), weights(alone)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
    assert load_head(tmp_path / "head", target).name == "eagle3"


def test_a_head_starts_from_another(uninterrupted, target, tmp_path):
    config = work.config(head_config={}, init_from=str(uninterrupted), steps=1, lr=1e-9, warmup=0.0)
    train(target, work.examples(), config, out=tmp_path / "head")
    ours, theirs = weights(tmp_path / "head"), weights(uninterrupted)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_the_average_is_what_is_saved(target, tmp_path):
    out = tmp_path / "head"
    head = train(target, work.examples(), work.config(ema=0.5), out=out)
    stored = load_file(run_directory(out) / "checkpoint-6" / "average.safetensors")
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            assert torch.equal(weight, stored[f"head.{name}"])


# What a user can get wrong, and the one line that says so.


def refused(error, match, *arguments, **keywords):
    with pytest.raises(error, match=match) as raised:
        prepare(*arguments, **keywords)
    assert isinstance(raised.value, CaptureHooksError)
    assert "\n" not in str(raised.value)


def test_an_empty_data_set(target):
    refused(TrainingError, "the data set is empty", target, [], work.config())


def test_conversations_longer_than_the_context(target):
    import copy

    short = copy.copy(target.config)
    short.max_position_embeddings = 20
    kept, target.config = target.config, short
    try:
        refused(DataError, "the model's context ends at 20", target, work.examples(), work.config())
    finally:
        target.config = kept


def test_tokens_of_another_vocabulary(target):
    items = [type(e)(e.token_ids + 10_000, e.loss_mask, e.source) for e in work.examples()]
    refused(DataError, "another model or tokenizer", target, items, work.config())


def test_nothing_but_masked_tokens(target):
    items = [type(e)(e.token_ids, torch.zeros_like(e.loss_mask), e.source) for e in work.examples()]
    refused(
        TrainingError, "nothing to learn: in .* the loss mask selects no token", target, items, work.config()
    )


def test_a_dump_of_another_spec(target, dump):
    refused(StoreError, "post.1, post.2", target, dump, work.config(spec="post.0, post.2, post.1"))


def test_a_dump_of_another_target(dump):
    refused(StoreError, "target model", work.target(seed=1), dump, work.config())


def test_a_draft_vocabulary_larger_than_the_targets(target):
    config = work.config(draft_vocab=10_000)
    refused(TrainingError, "draft vocabulary of 10000 tokens is larger", target, work.examples(), config)


@pytest.mark.parametrize(
    "spec", ["out:lm_head", "post.0, out:lm_head", "in:model.layers.0.mlp.down_proj, post.1"]
)
def test_points_of_another_width(target, spec):
    refused(TrainingError, "columns a token; a head of", target, work.examples(), work.config(spec=spec))


def test_a_setting_the_head_does_not_have(target):
    config = work.config(head_config={"step_decy": 0.5})
    refused(TrainingError, "no setting 'step_decy'; did you mean step_decay", target, work.examples(), config)


def test_a_head_to_start_from_that_does_not_fit(uninterrupted, target):
    start = {"init_from": str(uninterrupted), "head_config": {}}
    other = work.config(**start, spec="post.0, post.1, pre.1")
    refused(CaptureHooksError, "post.1", target, work.examples(), other)
    smaller = work.config(**start, draft_vocab=11)
    refused(TrainingError, "a draft vocabulary of 11 was asked for", target, work.examples(), smaller)
    config = work.config(**start)
    refused(HeadError, "another target", work.target(seed=1), work.examples(), config)


def test_nan_in_the_states(target, dump, tmp_path):
    import shutil
    import struct

    broken = tmp_path / "dump"
    shutil.copytree(dump.directory, broken)
    shard = next(broken.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    size = struct.unpack("<Q", raw[:8])[0]
    first = 8 + size + json.loads(raw[8 : 8 + size])["states"]["data_offsets"][0]
    raw[first : first + 4] = struct.pack("<f", float("nan"))
    shard.write_bytes(raw)
    with pytest.raises(TrainingError, match=r"states of sequence 0 hold NaN .* token 0, column 0"):
        train(target, Dump.open(broken), work.config(held_out=0.0), out=tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_nan_in_states_captured_on_the_way(tmp_path):
    sick = work.target()
    with torch.no_grad():
        sick.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(CaptureHooksError, match="NaN"):
        train(sick, work.examples(), work.config(), out=tmp_path / "head")


def test_a_resumed_run_keeps_its_settings_and_data(target, tmp_path):
    out = tmp_path / "head"
    with pytest.raises(TrainingError, match="nothing to resume"):
        train(target, work.examples(), work.config(), out=out, resume=True)
    train(target, work.examples(), work.config(steps=2), out=out)
    with pytest.raises(TrainingError, match=r"lr: 0\.01 then, 0\.02 now"):
        train(target, work.examples(), work.config(steps=4, lr=0.02), out=out, resume=True)
    with pytest.raises(TrainingError, match="other data"):
        train(target, work.examples(seed=1), work.config(steps=4), out=out, resume=True)
    with pytest.raises(TrainingError, match="exists already"):
        train(target, work.examples(), work.config(), out=out)
    train(target, work.examples(), work.config(steps=4), out=out, resume=True)
    assert [entry["step"] for entry in lines(out)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "say how long to train"),
        ({"steps": 0}, "steps must be greater than 0, not 0"),
        ({"steps": 1, "held_out": 1.0}, "held_out must be less than 1, not 1.0"),
        ({"steps": 1, "precision": "int8"}, "precision must be .float32., .bf16. or .fp16., not .int8."),
        ({"steps": 1, "workers": -1}, "workers must be greater than or equal to 0, not -1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(TrainingError, match=message):
        TrainConfig(**settings)


def test_settings_are_read_back():
    config = work.config(betas=(0.8, 0.9), trainer_args={"torch_compile": False})
    again = TrainConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    with pytest.raises(TrainingError, match="unknown fields: colour"):
        TrainConfig.from_json({"steps": 1, "colour": "red"})


@pytest.mark.parametrize("changed", [{"precision": "bf16"}, {"accumulate": 3, "epochs": 0.5}, {"workers": 1}])
def test_other_ways_to_run(target, dump, tmp_path, changed):
    out = tmp_path / "head"
    train(target, dump, work.config(**changed), out=out)
    assert load_head(out, target).lm_head.weight.dtype == torch.float32
    losses = [entry["loss_1"] for entry in lines(out)]
    assert 0 < len(losses) <= 6
    assert all(0 < loss < 20 for loss in losses)
