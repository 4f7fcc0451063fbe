"""Real vLLM as an engine that answers, for `eval` and `data regenerate`: two starts of a server each."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

from both_engines import (
    MODEL,
    check_command,
    check_report,
    evaluate,
    interrupted,
    job,
    make_talker,
    write_talks,
)
from capture_hooks_vllm.driver import VllmDriver
from vllm_setting import CPU, FLAGS, SIZES

from capture_hooks.decoding.contract import Sampling
from capture_hooks.testing import tiny

DRAFTING = [*FLAGS, "--max-model-len", "512"]
TALKING = [*FLAGS, "--max-model-len", "256"]
PROMPTS = ["What is the capital of France?", "Write a short poem about the sea.", "What is a tide?"]
STEPS = 3


@pytest.mark.slow
@pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's target is made by examples/smollm2/target.py")
def test_the_report_is_that_of_the_embedded_decoder(tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = ("--engine", "vllm", "--", *DRAFTING, "--spec-tokens", str(STEPS))
    report = evaluate(data, CPU, *words)
    embedded = evaluate(data, CPU, "--draft-tokens", str(STEPS), "--dtype", "float32")["decoding"]
    check_report(report, "vllm", len(PROMPTS), STEPS, embedded)
    assert report["settings"]["num_speculative_tokens"] == str(STEPS)
    assert report["settings"]["dtype"] == "float32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("regenerate")
    write_talks(root / "talks.jsonl")
    return root


@pytest.fixture(scope="module")
def model(folder):
    return make_talker(tiny.llama(**SIZES), folder / "model")


@pytest.mark.slow
def test_its_answers_are_those_of_generate(folder, model):
    check_command("vllm", folder, model, TALKING, CPU)


@pytest.mark.slow
def test_samples_are_drawn_by_the_seed_of_each_answer_and_survive_an_interruption(folder, model, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, ends=(2,))
    with VllmDriver().generate(folder / "model", sampling, TALKING) as engine:
        assert engine.context == 256
        whole = job(folder, "whole.jsonl", sampling).run(engine)
        assert interrupted(folder, "again.jsonl", sampling, engine) == whole
    assert (folder / "whole.jsonl").read_bytes() == (folder / "again.jsonl").read_bytes()
