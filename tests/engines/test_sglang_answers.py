"""Real SGLang as an engine that answers, for `eval` and `data regenerate`: two starts of a server each."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

from both_engines import (
    MODEL,
    check_command,
    check_report,
    evaluate,
    interrupted,
    make_talker,
    write_talks,
)
from capture_hooks_sglang.driver import SGLangDriver
from cpu_settings import CPU, FLAGS

from capture_hooks.decoding.contract import Sampling
from capture_hooks.testing import tiny

DRAFTING = [*FLAGS, "--disable-cuda-graph", "--max-total-tokens", "4096", "--max-running-requests", "2"]
TALKING = [*FLAGS, "--disable-cuda-graph", "--max-total-tokens", "1024", "--max-running-requests", "4"]
PROMPTS = ["What is the capital of France?", "Write a short poem about the sea."]
STEPS = 3


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's target is made by examples/smollm2/target.py")
def test_the_report_is_that_of_the_embedded_decoder(tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = ("--engine", "sglang", "--", *DRAFTING, "--speculative-num-steps", str(STEPS))
    report = evaluate(data, CPU, *words)
    embedded = evaluate(data, CPU, "--draft-tokens", str(STEPS), "--dtype", "float32")["decoding"]
    check_report(report, "sglang", len(PROMPTS), STEPS, embedded)
    assert report["settings"]["speculative_num_steps"] == str(STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("regenerate")
    write_talks(root / "talks.jsonl")
    return root


@pytest.fixture(scope="module")
def model(folder):
    return make_talker(tiny.llama(), folder / "model")


@pytest.mark.slow
def test_its_answers_are_those_of_generate(folder, model):
    check_command("sglang", folder, model, TALKING, CPU)


@pytest.mark.slow
def test_samples_and_an_interruption(folder, model, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, ends=(2,))
    with SGLangDriver().generate(folder / "model", sampling, TALKING) as engine:
        interrupted(folder, "sampled.jsonl", sampling, engine)
