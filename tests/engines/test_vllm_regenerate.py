"""``capture-hooks data regenerate --engine vllm`` on real vLLM: two starts of a server."""

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

from capture_hooks_vllm.driver import VllmDriver
from regenerated import check_command, interrupted, job, make_talker, write_talks
from vllm_setting import CPU, FLAGS, SIZES

from capture_hooks.decoding.contract import Sampling
from capture_hooks.testing import tiny

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
    check_command("vllm", folder, model, WORDS, CPU)


@pytest.mark.slow
def test_samples_are_drawn_by_the_seed_of_each_answer_and_survive_an_interruption(folder, model, monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    sampling = Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, ends=(2,))
    with VllmDriver().generate(folder / "model", sampling, WORDS) as engine:
        assert engine.context == 256
        whole = job(folder, "whole.jsonl", sampling).run(engine)
        assert interrupted(folder, "again.jsonl", sampling, engine) == whole
    assert (folder / "whole.jsonl").read_bytes() == (folder / "again.jsonl").read_bytes()
