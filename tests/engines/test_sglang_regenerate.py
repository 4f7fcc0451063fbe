"""``capture-hooks data regenerate --engine sglang`` on real SGLang: two starts of a server."""

import importlib.util

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

from capture_hooks_sglang.driver import SGLangDriver
from cpu_settings import CPU
from regenerated import check_command, interrupted, make_talker, write_talks

from capture_hooks.decoding.contract import Sampling
from capture_hooks.testing import tiny

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
    check_command("sglang", folder, model, WORDS, CPU)


@pytest.mark.slow
def test_samples_and_an_interruption(folder, model, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, ends=(2,))
    with SGLangDriver().generate(folder / "model", sampling, WORDS) as engine:
        interrupted(folder, "sampled.jsonl", sampling, engine)
