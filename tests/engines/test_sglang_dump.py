"""Dumps through real SGLang against the embedded engine's: chunked prefill, a kill and two ranks.

Three starts of a server, each 20 to 50 seconds on a quiet machine.
"""

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

from both_engines import CLI, check_equal, write_records
from capture_hooks_sglang.driver import SGLangDriver
from cpu_settings import CPU, FLAGS
from transformers import AutoModelForCausalLM

from capture_hooks.engines.dump import EngineStates, dtype_of, first_states
from capture_hooks.errors import EngineError
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, ModelStates, estimate, read_examples, write_dump
from capture_hooks.store.manifest import Manifest
from capture_hooks.target import checkpoint_fingerprint, hollow_anatomy
from capture_hooks.testing import tiny

CHUNK = 24
FLAGS = [*FLAGS, "--max-total-tokens", "1024", "--chunked-prefill-size", str(CHUNK)]
#: Out of order, with a state from before the first layer, and a target that is no input.
SPEC = CaptureSpec.parse("post.4, embed, post.2")
CONTEXT = 256
#: Ragged, around the chunk, and one that fills the model's context.
LENGTHS = [5, 40, 1, 23, 24, 25, 7, CONTEXT, 48, 49, 3, 90, 12]
SHARD = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("dump")
    tiny.model("llama", max_position_embeddings=CONTEXT).save_pretrained(root / "model")
    write_records(root / "data.jsonl", LENGTHS)
    return root


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def embedded(folder):
    """The embedded engine's dump."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    write_dump(
        ModelStates(model, SPEC, read_examples(folder / "data.jsonl"), shard_tokens=SHARD),
        folder / "embedded",
    )
    return Dump.open(folder / "embedded", verify=True)


def started_by(pid):
    """Processes whose command line names ``pid`` as the one they belong to."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"capture_hooks.engines.bound" in words and str(pid).encode() in words:
            found.append(int(path.parent.name))
    return found


def test_a_dump_that_was_killed_goes_on_and_equals_the_embedded_engines(folder, embedded):
    out = folder / "killed"
    command = [*CLI, "dump", "--engine", "sglang"]
    command += ["--model", str(folder / "model"), "--spec", str(SPEC), "--data", str(folder / "data.jsonl")]
    command += ["--out", str(out), "--shard-tokens", str(SHARD), "--", *FLAGS]
    with (folder / "first.log").open("wb") as log:
        first = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    while first.poll() is None and not ((out / "manifest.json").exists() and Manifest.read(out).shards):
        time.sleep(0.005)
    first.kill()
    assert first.wait() == -signal.SIGKILL, (folder / "first.log").read_text()
    deadline = time.monotonic() + 30
    while started_by(first.pid) and time.monotonic() < deadline:  # its server ends with it
        time.sleep(0.1)
    assert not started_by(first.pid)
    assert not Manifest.read(out).complete
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "tokens are there already" in again.stdout
    check_equal(Dump.open(out, SPEC, verify=True), embedded, "sglang", len(LENGTHS))


def test_two_ranks_give_the_same_dump_and_errors_name_the_sequence(folder, embedded, monkeypatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    examples = read_examples(folder / "data.jsonl")
    with SGLangDriver().capture(folder / "model", SPEC, [*FLAGS, "--tp-size", "2"]) as engine:
        assert engine.settings["tp_size"] == "2"
        assert engine.batch_tokens == CHUNK
        trial = first_states(engine, examples)
        fingerprint = checkpoint_fingerprint(str(folder / "model"), dtype_of(trial))
        anatomy = hollow_anatomy(str(folder / "model"))
        job = EngineStates(engine, trial, anatomy, fingerprint, SPEC, examples, shard_tokens=SHARD)
        cost = estimate(job, folder / "two")
        assert (cost.tokens, cost.tokens_left) == (sum(LENGTHS), sum(LENGTHS))
        write_dump(job, folder / "two")
        with pytest.raises(EngineError, match=rf"sequence 1: SGLang refused: .*{CONTEXT + 40} tokens"):
            list(engine.states([[5, 6, 7], [5] * (CONTEXT + 40)]))
        # What was refused leaves nothing behind, and the engine goes on.
        assert [len(states.inputs) for states in engine.states([[5, 6, 7]])] == [3]
    check_equal(Dump.open(folder / "two", SPEC, verify=True), embedded, "sglang", len(LENGTHS))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engine", "sglang", "--batch-tokens", "8"], "--batch-tokens"),
        (["--engine", "sgland"], "did you mean 'sglang'"),
        (["--", "--tp-size", "2"], "unexpected '--tp-size'"),
        (["--engine", "sglang", "--", "--model-path", "elsewhere"], "name the model once"),
        (["--engine", "sglang", "--spec", "post.99"], "post.99"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(folder, words, told):
    command = [*CLI, "dump", "--model", str(folder / "model")]
    command += ["--data", str(folder / "data.jsonl"), "--out", str(folder / "none"), "--spec", str(SPEC)]
    run = subprocess.run(
        [*command, *words], capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert run.returncode != 0
    assert told in run.stdout + run.stderr
    assert not (folder / "none").exists()
