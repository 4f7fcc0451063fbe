"""``capture-hooks data regenerate --engine vllm`` on real vLLM: two starts of a server."""

import importlib.util
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

from capture_hooks_vllm.running.generation import generation
from regenerated import NEW, TALKS, by_hand, interrupted, job, make_talker, read, write_talks
from vllm_setting import CPU, FLAGS, SIZES

from capture_hooks.decoding.contract import Sampling
from capture_hooks.testing import tiny

CLI = [sys.executable, "-c", "from capture_hooks.cli import main; main()"]
WORDS = [*FLAGS, "--max-model-len", "256"]


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
    out = folder / "greedy.jsonl"
    words = ["data", "regenerate", str(folder / "talks.jsonl"), "--model", str(folder / "model")]
    words += ["--out", str(out), "--max-new-tokens", str(NEW), "--unfinished", "keep", "--engine", "vllm"]
    run = subprocess.run(
        [*CLI, *words, "--", *WORDS], capture_output=True, text=True, env={**os.environ, **CPU}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"data    {TALKS} rows, {2 * TALKS} answers to write" in run.stdout
    assert "engine  vllm " in run.stdout
    assert read(out) == by_hand(model)


@pytest.mark.slow
def test_samples_are_drawn_by_the_seed_of_each_answer_and_survive_an_interruption(folder, model, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, ends=(2,))
    data = folder / "talks.jsonl"
    with generation(folder / "model", sampling, WORDS) as engine:
        assert engine.context == 256
        whole = job(data, folder / "whole.jsonl", sampling).run(engine)
        interrupted(job(data, folder / "again.jsonl", sampling), engine, 7)
        again = job(data, folder / "again.jsonl", sampling)
        assert 7 <= 2 * TALKS - again.left < 2 * TALKS
        assert again.run(engine) == whole
    assert whole.answers == 2 * TALKS
    assert (folder / "whole.jsonl").read_bytes() == (folder / "again.jsonl").read_bytes()
    answers = [
        message["content"] for row in read(folder / "whole.jsonl") for message in row["messages"][1::2]
    ]
    assert len(set(answers)) > TALKS
