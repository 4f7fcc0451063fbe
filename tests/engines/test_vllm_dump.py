"""Dumps through real vLLM against the embedded engine's: chunked prefill, a kill, another family.

Three starts of a server, each 15 to 40 seconds on a quiet machine.
"""

import importlib.util
import os
import signal
import subprocess
import time

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

import psutil
from both_engines import CLI, check_equal, short_directory, write_records
from capture_hooks_vllm.driver import VllmDriver
from vllm_setting import CPU, FLAGS, make_target

from capture_hooks.engines.dump import EngineStates, dtype_of, first_states
from capture_hooks.errors import CaptureHooksError, EngineError
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, ModelStates, read_examples, write_dump
from capture_hooks.store.manifest import Manifest
from capture_hooks.target import checkpoint_fingerprint, hollow_anatomy

CHUNK = 64
#: Out of order, with a state from before the first layer, and a target that is no input.
SPEC = CaptureSpec.parse("post.4, embed, post.2")
CONTEXT = 256
#: Ragged, around the chunk, and one that fills the model's context.
LENGTHS = [5, 40, 1, 63, 64, 65, 7, CONTEXT, 128, 129, 3, 90, 12]
SHARD = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("dump")
    write_records(root / "data.jsonl", LENGTHS)
    return root


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU.items():
            patch.setenv(name, value)
        yield


def embedded(folder, model, spec):
    """The embedded engine's dump."""
    out = folder / f"embedded-{model.config.model_type}"
    write_dump(ModelStates(model.eval(), spec, read_examples(folder / "data.jsonl"), shard_tokens=SHARD), out)
    return Dump.open(out, verify=True)


def gone(processes):
    """Whether processes that were started have ended, or are about to be reaped."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def temporary():
    with short_directory() as directory:
        yield directory


def test_a_dump_that_was_killed_goes_on_and_equals_the_embedded_engines(folder, temporary):
    model = make_target(folder / "llama", "llama", max_position_embeddings=CONTEXT)
    out = folder / "killed"
    command = [*CLI, "dump", "--engine", "vllm"]
    command += ["--model", str(folder / "llama"), "--spec", str(SPEC), "--data", str(folder / "data.jsonl")]
    command += ["--out", str(out), "--shard-tokens", str(SHARD), "--"]
    command += [*FLAGS, "--max-num-batched-tokens", str(CHUNK)]
    places = [temporary / name for name in ("first", "again")]
    for place in places:
        place.mkdir()
    environment = {**os.environ, "TMPDIR": str(places[0])}
    with (folder / "first.log").open("wb") as log:
        first = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    while first.poll() is None and not ((out / "manifest.json").exists() and Manifest.read(out).shards):
        time.sleep(0.005)
    started = psutil.Process(first.pid).children(recursive=True)
    assert len(started) >= 3  # the server, its engine, a worker
    first.kill()
    assert first.wait() == -signal.SIGKILL, (folder / "first.log").read_text()
    assert gone(started)
    assert not Manifest.read(out).complete
    # What the second one leaves in the directory for temporary files is nothing.
    environment = {**os.environ, "TMPDIR": str(places[1])}
    again = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "tokens are there already" in again.stdout
    assert [path.name for path in places[1].iterdir() if not path.name.startswith("torchinductor")] == []
    check_equal(Dump.open(out, SPEC, verify=True), embedded(folder, model, SPEC), "vllm", len(LENGTHS))


def test_a_scaled_stream_the_norm_as_input_and_errors_that_name_the_sequence(folder):
    """Granite scales its embedding, its residual branches and its logits."""
    spec = CaptureSpec.parse("final_norm, embed, post.1, post.5")
    model = make_target(folder / "granite", "granite", max_position_embeddings=CONTEXT)
    examples = read_examples(folder / "data.jsonl")
    with VllmDriver().capture(folder / "granite", spec, [*FLAGS, "--max_num_batched_tokens=64"]) as engine:
        assert (engine.batch_tokens, engine.settings["dtype"]) == (CHUNK, "float32")
        trial = first_states(engine, examples)
        fingerprint = checkpoint_fingerprint(str(folder / "granite"), dtype_of(trial))
        anatomy = hollow_anatomy(str(folder / "granite"))
        job = EngineStates(engine, trial, anatomy, fingerprint, spec, examples, shard_tokens=SHARD)
        write_dump(job, folder / "ours")
        with pytest.raises(EngineError, match=rf"sequence 1: vLLM refused: .*{CONTEXT + 40}"):
            list(engine.states([[5, 6, 7], [5] * (CONTEXT + 40)]))
        # What was refused leaves nothing behind, and the engine goes on.
        assert [len(states.inputs) for states in engine.states([[5, 6, 7]])] == [3]
    check_equal(
        Dump.open(folder / "ours", spec, verify=True), embedded(folder, model, spec), "vllm", len(LENGTHS)
    )


@pytest.mark.parametrize(
    ("spec", "words", "told"),
    [
        (SPEC, ["--model", "elsewhere"], "name the model once"),
        (SPEC, ["--port", "1"], "asked by plain HTTP on this machine alone"),
        (SPEC, ["--speculative-config.model", "x"], "--speculative-config: a dump sets it"),
        (CaptureSpec.parse("post.99"), [], "post.99"),
        (CaptureSpec.parse("post.1, out:model.norm"), [], "out:model.norm is a submodule's value"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(folder, spec, words, told):
    make_target(folder / "refused", max_position_embeddings=CONTEXT)
    with pytest.raises(CaptureHooksError, match=told), VllmDriver().capture(folder / "refused", spec, words):
        pass


def test_a_start_that_fails_says_why(folder):
    """The first exception that one of its processes raised, not the last that only says it failed."""
    make_target(folder / "wide")
    with (
        pytest.raises(EngineError, match=r"^vLLM ended with 1: ValidationError: .*no_such_quantisation"),
        VllmDriver().capture(folder / "wide", SPEC, [*FLAGS, "--quantization", "no_such_quantisation"]),
    ):
        pass
