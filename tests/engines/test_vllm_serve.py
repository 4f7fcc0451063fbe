"""``capture-hooks serve --engine vllm``: proven before it is ready, refused with a reason, gone when stopped.

Four starts of a server, each 15 to 40 seconds on a quiet machine.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed (make vllm)", allow_module_level=True)

from both_engines import COMMAND, HEAD, LONG, MODEL, free_port, greedy_answer, serving, short_directory
from capture_hooks_vllm.driver import VLLM, VllmDriver
from safetensors.torch import load_file, save_file
from vllm_setting import CPU, FLAGS, make_target, save_a_head

EAGER = (*FLAGS, "--dtype", "float32", "--enforce-eager", "--max-model-len", "512")
QUESTION, TOKENS = "Explain in two sentences why the sky is blue.", 24


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture
def temporary():
    with short_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny target, another of the same shape, and a head for the first."""
    root = tmp_path_factory.mktemp("serve")
    target = make_target(root / "target", num_hidden_layers=8, max_position_embeddings=512)
    make_target(root / "other", num_hidden_layers=8, max_position_embeddings=512, seed=3)
    save_a_head(target, "post.1, post.3, post.5", root / "head")
    return root


def started(words, temporary, port, environment=None):
    return serving(words, temporary, port, {**CPU, **(environment or {})})


def serve(head, model, port, *words):
    line = [COMMAND, "serve", head, "--engine", "vllm", "--model", model, "--", *EAGER]
    return [*line, "--port", port, *words]


@pytest.mark.skipif(not MODEL.is_dir(), reason="the demo's target is made by examples/smollm2/target.py")
def test_it_is_proven_serves_plain_greedys_answer_and_leaves_nothing(port, temporary):
    plain = greedy_answer(MODEL, QUESTION, TOKENS)
    with started(serve(HEAD, MODEL, port), temporary, port) as server:
        server.wait_for("capture-hooks: serving at")
        first = server.text().splitlines()[0]
        assert first.startswith(f"CAPTURE_HOOKS_HEAD={HEAD} VLLM_CPU_KVCACHE_SPACE=1 ")
        assert f"-m {VllmDriver.module} --model {MODEL} " in first
        told = server.told()
        assert told[0] == (
            "capture-hooks: rank 0 captures post.2, post.15, post.27 (boundaries 3, 16, 28) by vLLM's own "
            f"capture, as the head {HEAD} asks; witness matches"
        )
        assert told[1].endswith(f"serving at http://127.0.0.1:{port}; reported by its rank: witness matches")
        assert server.ask(str(MODEL), QUESTION, TOKENS).choices[0].message.content == plain
        refused = subprocess.run(
            [str(word) for word in serve(HEAD, MODEL, port)], capture_output=True, text=True
        )
        assert refused.returncode == 1
        assert "cannot be had (Address already in use)" in refused.stderr
        assert server.stop(signal.SIGINT, patience=30) == 130
        assert server.text().splitlines()[-1] == "capture-hooks: the server was stopped, by SIGINT"
        assert list(temporary.glob("capture-hooks-*")) == []


def test_another_target_is_refused_with_the_reason_last(small, port, temporary):
    words = serve(small / "head", small / "other", port, "--skip-tokenizer-init")
    with started(words, temporary, port) as refused:
        assert refused.process.wait(LONG) == 1
    last = refused.text()[refused.text().rindex("error: ") :]
    assert last.startswith("error: the server was stopped; it must not serve this head\nrank 0: it captures")
    assert "no state of this model is near it: other target weights?" in last
    assert "capture-hooks: serving" not in refused.text()
    assert list(temporary.glob("capture-hooks-*")) == []


def edited(small, place):
    """The head with every id one lower, and a section that says nothing of it."""
    head = small / place
    shutil.copytree(small / "head", head)
    config = json.loads((head / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]
    (head / "config.json").write_text(json.dumps(config))
    return head


def test_ids_one_lower_are_named_before_anything_starts(small, port):
    words = serve(edited(small, "told"), small / "target", port)
    refused = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "[1, 3, 5] (pre.1, pre.3, pre.5), and the capture section says [2, 4, 6]" in refused.stderr


def test_a_server_started_by_hand_names_every_slot_that_is_wrong(small, port, temporary):
    head = edited(small, "by-hand")
    driver = VllmDriver()
    command = driver.compose(head, small / "target", [*EAGER, "--port", str(port), "--skip-tokenizer-init"])
    environment = driver.with_head({**CPU, "CAPTURE_HOOKS_VERIFY": "strict"}, head)
    with started(command.argv, temporary, port, environment) as refused:
        assert refused.process.wait(LONG) == 1
    said = refused.text()
    assert "this server would feed the head other states than it was trained on. prefill: mismatch" in said
    for slot, (wanted, held) in enumerate((("post.1", "post.0"), ("post.3", "post.2"), ("post.5", "post.4"))):
        assert f"slot {slot} should hold {wanted} and holds {held}" in said
    assert "Application startup complete" not in said


def test_a_permuted_witness_is_refused_and_warn_mode_serves(small, port, temporary):
    """Slots that changed places: each is named with the state that it holds."""
    head = small / "permuted"
    shutil.copytree(small / "head", head)
    path = head / "capture" / "witness.safetensors"
    states = load_file(path)
    with (path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(size))["__metadata__"]
    states["post.1"], states["post.5"] = states["post.5"], states["post.1"]
    save_file(states, path, metadata)
    words = serve(head, small / "target", port, "--skip-tokenizer-init")
    with started(words, temporary, port, {"CAPTURE_HOOKS_VERIFY": "warn"}) as served:
        served.wait_for("capture-hooks: serving at")
        assert "reported by its rank: witness mismatch" in served.text()
        assert "slot 0 should hold post.1 and holds post.1" in served.text()
        assert "where this model's post.5 is" in served.text()


INERT = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_num_seqs=2, skip_tokenizer_init=True)
(answer,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=2, detokenize=False))
assert len(answer.outputs[0].token_ids) == 2
from vllm.v1.worker.worker_base import WorkerWrapperBase
assert not hasattr(WorkerWrapperBase.initialize_from_config, "capture_hooks_follows")
assert "capture_hooks_vllm.activate" in sys.modules
ours = {name for name in sys.modules if name.split(".")[0].startswith("capture_hooks")}
assert ours == {"capture_hooks_vllm", "capture_hooks_vllm.activate"}, ours
"""


def test_an_ordinary_engine_is_as_without_the_plugin(small):
    environment = {**os.environ, **CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    run = subprocess.run(
        [sys.executable, "-c", INERT, small / "target"], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_every_feature_that_an_untested_version_is_judged_by_is_in_this_one():
    package = Path(importlib.util.find_spec("vllm").origin).parent
    assert [why for feature in VLLM.features if (why := feature.lacking(package))] == []
    assert VLLM.is_tested(VLLM.version())
