"""The command line that `serve` runs: what is added, what of the user's is kept, what is refused."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from capture_hooks_vllm import HEAD as HEAD_SETTING
from capture_hooks_vllm.driver import VllmDriver
from hypothesis import given
from hypothesis import strategies as st

from capture_hooks.errors import EngineError

HEAD, MODEL = Path("heads/one"), Path("models/two")
DRIVER = VllmDriver()
compose = DRIVER.compose


def drafting(argv):
    """What vLLM's own parser takes: the last of several."""
    return json.loads(argv[len(argv) - 1 - argv[::-1].index("--speculative-config") + 1])


def test_alone_it_is_a_chain_of_three_drafts():
    command = compose(HEAD, MODEL, [])
    assert command.argv[:5] == (sys.executable, "-m", DRIVER.module, "--model", "models/two")
    assert drafting(command.argv) == {"method": "eagle3", "model": "heads/one", "num_speculative_tokens": 3}
    assert command.url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["--spec-tokens", "5"], 5),
        (["--spec_tokens=5"], 5),
        (["-sc", '{"num_speculative_tokens": 4}'], 4),
        (['--speculative-config={"method": "eagle3", "num_speculative_tokens": 4}'], 4),
        (["--spec-tokens", "5", "--speculative-config", '{"draft_tensor_parallel_size": 1}'], 5),
    ],
)
def test_the_users_length_of_a_chain_is_kept(words, steps):
    argv = compose(HEAD, MODEL, words).argv
    assert drafting(argv)["num_speculative_tokens"] == steps
    assert [word.partition("=")[0] for word in argv].count("--speculative-config") == 1
    assert not any(word.startswith(("--spec-tokens", "--spec_tokens", "-sc")) for word in argv)


OTHERS = [
    ["--dtype", "float32"],
    ["--enforce-eager"],
    ["-tp", "2"],
    ["--port=81"],
    ["--seed", "-1"],
    ["--x.y", "1"],
]


@given(st.lists(st.sampled_from([*OTHERS, ["--spec-tokens", "2"], ["-sc", "{}"]]), max_size=8))
def test_only_flags_about_drafting_are_taken_out(groups):
    kept = DRIVER.without([word for group in groups for word in group], "speculation", "steps")
    assert kept == [word for group in groups if group in OTHERS for word in group]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "models/other"], "models/two and --model models/other are two"),
        (["--spec-method", "ngram"], "--spec-method: the method is eagle3, the head heads/one"),
        (["--spec-model", "x"], "--spec-model: the method is eagle3"),
        (["-sc", '{"method": "ngram"}'], "names the method 'ngram', not 'eagle3'"),
        (["-sc", '{"model": "heads/other"}'], "names the model 'heads/other', not 'heads/one'"),
        (["--speculative-config.num_speculative_tokens", "4"], "give it as one JSON object"),
        (["-sc", "[]"], "give it as one JSON object"),
        (["--spec-tokens", "0"], "--spec-tokens is '0'"),
        (["--port", "x"], "--port is 'x'"),
        (["--nnodes", "2"], "--nnodes 2: ranks on other machines cannot report"),
        (["--grpc"], "--grpc: serve follows a server over HTTP"),
        (["--headless"], "--headless: serve follows"),
        (["--uds", "file"], "--uds: serve follows"),
    ],
)
def test_flags_that_cannot_be_served_are_refused(words, said):
    with pytest.raises(EngineError) as caught:
        compose(HEAD, MODEL, words)
    assert said in str(caught.value)


def test_a_file_of_flags_is_refused(tmp_path):
    file = tmp_path / "flags.yaml"
    file.write_text("port: 81\n")
    with pytest.raises(EngineError, match="--config"):
        compose(HEAD, MODEL, ["--config", str(file)])


def test_what_is_shown_runs_in_a_shell_and_keeps_secrets():
    command = compose(HEAD, Path("a model"), ["--api-key", "hush"])
    environment = DRIVER.with_head(
        {"VLLM_API_KEY": "hush", "VLLM_CPU_KVCACHE_SPACE": "1", "HOME": "/home"}, HEAD
    )
    line = DRIVER.shown_command(command, environment)
    assert command.api_key == "hush"
    assert "hush" not in line
    assert "HOME" not in line
    words = shlex.split(line)
    assert words[: words.index(sys.executable)] == [
        f"{HEAD_SETTING}=heads/one",
        "VLLM_API_KEY=***",
        "VLLM_CPU_KVCACHE_SPACE=1",
        "VLLM_USE_V2_MODEL_RUNNER=0",
    ]
    assert tuple(words[words.index(sys.executable) :]) == tuple(
        word.replace("hush", "***") for word in command.argv
    )


def test_the_environment_chooses_the_model_runner():
    assert DRIVER.with_head({"VLLM_USE_V2_MODEL_RUNNER": "1"}, HEAD)["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_the_plain_command_is_vllms_alone():
    words = DRIVER.plain(HEAD, MODEL)
    assert words[:5] == ["python", "-m", DRIVER.module, "--model", "models/two"]
    assert drafting(words)["model"] == "heads/one"
    assert DRIVER.drafting(HEAD, [])[0] == "--speculative-config"
