"""``capture-hooks eval --engine vllm`` with the head that ships: two starts of a server."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

from vllm_setting import CPU, FLAGS

ROOT = Path(__file__).parents[2]
MODEL, HEAD = ROOT / "build" / "smollm2", ROOT / "examples" / "smollm2" / "head"
CLI = [sys.executable, "-c", "from capture_hooks.cli import main; main()"]
PROMPTS = ["What is the capital of France?", "Write a short poem about the sea.", "What is a tide?"]
STEPS, NEW = 3, 40


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("eval") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def evaluate(prompts, *words):
    command = [*CLI, "eval", "--model", str(MODEL), "--head", str(HEAD)]
    command += ["--data", str(prompts), "--max-new-tokens", str(NEW), "--json", *words]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **CPU})
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's target is made by examples/smollm2/target.py")
def test_the_report_is_that_of_the_embedded_decoder(prompts):
    words = ("--engine", "vllm", "--", *FLAGS, "--max-model-len", "512", "--spec-tokens", str(STEPS))
    report = evaluate(prompts, *words)
    decoding = report["decoding"]
    assert report["identical"] == report["prompts"] == len(PROMPTS)
    assert report["lossless"]
    assert report["settings"]["engine"] == "vllm"
    assert report["settings"]["num_speculative_tokens"] == str(STEPS)
    assert report["settings"]["dtype"] == "float32"
    # Every round gains its accepted drafts and one token of the target's own; the last may be cut.
    gained = decoding["rounds"] + sum(decoding["accepted"])
    assert 0 <= gained - decoding["tokens"] <= STEPS * len(PROMPTS)
    assert decoding["reached"][0] == decoding["rounds"]
    assert decoding["reached"][1:] == decoding["accepted"][:-1]
    assert decoding["drafted"] == STEPS * decoding["rounds"]
    assert decoding["acceptance_length"] > 1.2
    for name in ("tokens_per_second", "plain_tokens_per_second", "speedup", "break_even"):
        assert report[name] > 0
    embedded = evaluate(prompts, "--draft-tokens", str(STEPS), "--dtype", "float32")["decoding"]
    assert decoding["acceptance_length"] == pytest.approx(embedded["acceptance_length"], rel=0.05)
