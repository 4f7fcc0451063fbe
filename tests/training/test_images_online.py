"""Conversations with images in training: online as from a dump, whatever shares the batch, and resumed."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from capture_hooks.errors import TrainingError
from capture_hooks.heads import load_head
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, Examples, ModelStates, write_dump
from capture_hooks.testing import tiny, tiny_vision
from capture_hooks.training import TrainConfig, run_directory, train
from capture_hooks.training.build import prepare
from capture_hooks.training.data import pack

pytest.importorskip("PIL", reason="images need pillow")
_spec = importlib.util.spec_from_file_location(
    "images_made", Path(__file__).parents[1] / "store/test_images.py"
)
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)
pictures = made.pictures
SPEC = "post.0, post.1, post.2"


def config(**changed):
    settings = {
        "spec": SPEC,
        "head_config": {"steps": 2, "feature_noise": 0.0},
        "steps": 4,
        "batch_tokens": 120,
        "lr": 0.01,
        "held_out": 0.2,
        "evaluations": 1,
        "log_steps": 1,
    }
    return TrainConfig(**(settings | changed))


def examples(family, pictures):
    return Examples("data", made.examples_of(family, pictures).items * 2)


def losses(out):
    text = (run_directory(out) / "log.jsonl").read_text().splitlines()
    entries = [
        {k: v for k, v in json.loads(line).items() if "loss" in k or "acceptance" in k} for line in text
    ]
    return [entry for entry in entries if entry]


@pytest.mark.parametrize("family", made.FAMILIES)
def test_online_is_the_same_training_as_from_a_dump(family, pictures, tmp_path):
    model, data = tiny.model(family), examples(family, pictures)
    write_dump(ModelStates(model, CaptureSpec.parse(SPEC), data), tmp_path / "dump")
    train(model, Dump.open(tmp_path / "dump"), config(), out=tmp_path / "offline")
    train(model, data, config(), out=tmp_path / "online")
    offline, online = losses(tmp_path / "offline"), losses(tmp_path / "online")
    assert len(offline) == len(online) >= 5
    for a, b in zip(offline, online, strict=True):
        assert a == pytest.approx(b, rel=2e-4, abs=1e-6)
    # What engines are shown as text holds no token of an image, and the head agrees with its target on it.
    head = load_head(tmp_path / "online", model)
    assert head.name == "eagle3"


@pytest.mark.parametrize("family", made.FAMILIES)
def test_states_do_not_depend_on_what_shares_the_batch_or_where_a_window_begins(family, pictures):
    model, data = tiny.model(family), examples(family, pictures)
    for longest in (16, None):
        setup = prepare(model, data, config(held_out=0.0, max_length=longest))
        pieces = [setup.train[at] for at in range(len(setup.train))]
        together = setup.capture(pack(pieces))
        for at, piece in enumerate(setup.train.pieces):
            turns = made.conversations(pictures)[piece.sequence % 4]
            states, _ = made.plainly(model, made.prepared(family, turns))
            wanted = torch.cat([states["post.0"], states["post.1"], states["post.2"]], dim=-1)
            rows = slice(together["starts"][at], together["starts"][at + 1])
            torch.testing.assert_close(
                together["states"][rows], wanted[piece.start : piece.stop], rtol=0, atol=2e-6
            )
            torch.testing.assert_close(
                together["target"][rows], states["final_norm"][piece.start : piece.stop], rtol=0, atol=2e-6
            )


def test_the_witness_holds_no_token_of_an_image(pictures):
    model, data = tiny.model("qwen2_5_vl"), examples("qwen2_5_vl", pictures)
    setup = prepare(model, data, config(held_out=0.0))
    assert setup.witness_tokens
    of_images = {260, 261, 262, 263}  # image, video, vision start and end in the tiny models
    assert any(of_images & set(example.token_ids.tolist()) for example in data)
    assert not any(of_images & set(tokens) for tokens in setup.witness_tokens)


def test_a_run_is_not_resumed_with_other_images(pictures, tmp_path):
    model = tiny.model("llava")
    train(model, examples("llava", pictures), config(), out=tmp_path / "head")
    tiny_vision.picture(9, 20, 28).save(pictures[0])
    with pytest.raises(TrainingError, match="data"):
        train(model, examples("llava", pictures), config(), out=tmp_path / "head", resume=True)
