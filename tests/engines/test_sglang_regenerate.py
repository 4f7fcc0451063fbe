"""``capture-hooks data regenerate --engine sglang`` on real SGLang: two starts of a server."""

import importlib.util
import os
import subprocess
import sys

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

from capture_hooks_sglang.running.generation import generation
from cpu_settings import CPU
from regenerated import NEW, TALKS, by_hand, interrupted, job, make_talker, read, write_talks

from capture_hooks.decoding.contract import Sampling
from capture_hooks.testing import tiny

CLI = [sys.executable, "-c", "from capture_hooks.cli import main; main()"]
WORDS = ["--device", "cpu", "--attention-backend", "intel_amx", "--dtype", "float32", "--disable-cuda-graph"]
WORDS += ["--disable-overlap-schedule", "--max-total-tokens", "1024", "--max-running-requests", "4"]


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
    out = folder / "greedy.jsonl"
    words = ["data", "regenerate", str(folder / "talks.jsonl"), "--model", str(folder / "model")]
    words += ["--out", str(out), "--max-new-tokens", str(NEW), "--unfinished", "keep", "--engine", "sglang"]
    run = subprocess.run(
        [*CLI, *words, "--", *WORDS], capture_output=True, text=True, env={**os.environ, **CPU}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"data    {TALKS} rows, {2 * TALKS} answers to write" in run.stdout
    assert "engine  sglang " in run.stdout
    assert read(out) == by_hand(model)


@pytest.mark.slow
def test_samples_and_an_interruption(folder, model, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, ends=(2,))
    with generation(folder / "model", sampling, WORDS) as engine:
        interrupted(job(folder / "talks.jsonl", folder / "sampled.jsonl", sampling), engine, 7)
        again = job(folder / "talks.jsonl", folder / "sampled.jsonl", sampling)
        assert 7 <= 2 * TALKS - again.left < 2 * TALKS
        assert again.run(engine).answers == 2 * TALKS
    rows = read(folder / "sampled.jsonl")
    assert len({message["content"] for row in rows for message in row["messages"][1::2]}) > TALKS
