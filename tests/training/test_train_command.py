"""``capture-hooks train`` as it is typed."""

import json
import os
import random
import signal
import threading
import time

import pytest
from typer.testing import CliRunner

from capture_hooks.cli.app import build
from capture_hooks.errors import ModelError, TrainingError
from capture_hooks.heads import load_head
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny.llama(num_hidden_layers=6).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Token ids: they need no tokenizer."""
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    rng = random.Random(0)

    def ids(length):
        return [rng.randrange(tiny.VOCAB) for _ in range(length)]

    records = [{"prompt_ids": ids(4), "answer_ids": ids(rng.randrange(5, 30))} for _ in range(20)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def command(*arguments):
    words = ["train", *map(str, arguments)]
    return CliRunner().invoke(build(words), words)


def test_a_head_is_trained_and_saved(model, data, tmp_path):
    out = tmp_path / "head"
    done = command(
        *("--model", model, "--data", data, "--out", out, "--spec", "post.0, post.2, post.4"),
        *("--steps", 3, "--batch-tokens", 150, "--draft-vocab", 60, "--init-from-target"),
        *("--ttt-steps", 2, "--set", "feature_noise=0"),
        *("--held-out", 0.3, "--evaluations", 1, "--log-steps", 1),
    )
    assert done.exit_code == 0, done.output
    for part in (
        "drafts 60 tokens, which cover",
        "3 steps of",
        "held-out acceptance",
        "draft position",
        f"saved {out}",
    ):
        assert part in done.output
    head = load_head(out, tiny.llama(num_hidden_layers=6))
    assert len(head.draft_token_ids) == 60
    assert head.spec == CaptureSpec.parse("post.0, post.2, post.4")


def test_ctrl_c_says_how_to_go_on_and_resume_does(model, data, tmp_path):
    out = tmp_path / "head"
    log = tmp_path / "head.training" / "log.jsonl"
    settings = ["--batch-tokens", 150, "--ttt-steps", 1, "--evaluations", 0, "--log-steps", 1]
    common = ("--model", model, "--data", data, "--out", out, "--spec", "post.0, post.2", *settings)

    def interrupt():
        until = time.monotonic() + 120
        while time.monotonic() < until and not (log.exists() and '"step": 2,' in log.read_text()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    stopped = command(*common, "--steps", 1_000_000)
    presser.join()
    assert stopped.exit_code == 130
    assert "the same command and --resume" in stopped.output
    assert not out.exists()
    step = int(stopped.output.partition("stopped after step ")[2].partition(";")[0])
    done = command(*common, "--steps", step + 1, "--resume")
    assert done.exit_code == 0, done.output
    assert json.loads(log.read_text().splitlines()[-1])["step"] == step + 1
    assert out.is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --dump or --data"),
        (("--data", "x", "--dump", "y"), "give either --dump or --data"),
        (("--data", "x", "--set", "steps"), "'steps' is not KEY=VALUE"),
        (("--data", "x", "--steps", "many"), "Invalid value for '--steps'"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(model, tmp_path, arguments, message):
    refused = command("--model", model, "--out", tmp_path / "head", *arguments)
    assert refused.exit_code == 2
    assert message in refused.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say how long to train"),
        (("--steps", 1, "--set", "colour=1"), "eagle3 has no setting 'colour'"),
        (("--steps", 1, "--resume"), "nothing to resume"),
        (("--steps", 1, "--draft-vocab", 10_000), "larger than the target's own"),
    ],
)
def test_what_cannot_be_done_is_one_line(model, data, tmp_path, arguments, message):
    spec = ("--spec", "post.0, post.2")
    refused = command("--model", model, "--data", data, "--out", tmp_path / "head", *spec, *arguments)
    assert isinstance(refused.exception, TrainingError)
    assert message in str(refused.exception)
    assert "\n" not in str(refused.exception)
    assert not (tmp_path / "head").exists()


def test_a_model_that_is_not_there(data, tmp_path):
    refused = command("--model", tmp_path / "none", "--data", data, "--out", tmp_path / "head", "--steps", 1)
    assert isinstance(refused.exception, ModelError)
    assert "cannot load the model" in str(refused.exception)
