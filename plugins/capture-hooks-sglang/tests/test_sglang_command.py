"""The command lines: what is added, what the user's flags change, what is shown, what is refused."""

import argparse
import shlex
import sys
from pathlib import Path

import pytest
from capture_hooks_sglang.driver import SGLangDriver
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.errors import EngineError

HEAD, MODEL = Path("heads/one"), Path("models/two")
DRIVER = SGLangDriver()
compose = DRIVER.compose


def sglang_reads(argv):
    """As SGLang's own parser does: argparse, in which the last of two equal flags wins."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model")
    parser.add_argument("--speculative-algorithm")
    for name in ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--dtype")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--disable-cuda-graph", action="store_true")
    assert argv[:3] == (sys.executable, "-m", "sglang.launch_server")
    return parser.parse_args(argv[3:])


def test_alone_it_is_a_chain_of_three_drafts():
    command = compose(HEAD, MODEL, [])
    read = sglang_reads(command.argv)
    assert (read.model_path, read.speculative_draft_model_path) == ("models/two", "heads/one")
    assert read.speculative_algorithm == "EAGLE3"
    tree = read.speculative_num_steps, read.speculative_eagle_topk, read.speculative_num_draft_tokens
    assert tree == (3, 1, 4)
    assert command.url == "http://127.0.0.1:30000"


SETTINGS = {
    "--speculative-num-steps": st.integers(1, 9),
    "--speculative-eagle-topk": st.integers(1, 9),
    "--speculative-num-draft-tokens": st.integers(2, 64),
    "--port": st.integers(1, 65535),
    "--host": st.sampled_from(["127.0.0.1", "localhost", "10.0.0.7"]),
    "--dtype": st.sampled_from(["auto", "float32"]),
    "--tp-size": st.integers(1, 8),
    "--tp": st.integers(1, 8),
}


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(sorted(SETTINGS)).flatmap(
            lambda flag: st.tuples(st.just(flag), SETTINGS[flag], st.booleans())
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_the_users_flags_win_and_nothing_of_them_is_lost(pairs, switch):
    words = ["--disable-cuda-graph"] * switch
    for flag, value, joined in pairs:
        words += [f"{flag}={value}"] if joined else [flag, str(value)]
    command = compose(HEAD, MODEL, words)
    assert command.argv[len(command.argv) - len(words) :] == tuple(words)
    read, given_alone = sglang_reads(command.argv), sglang_reads((*command.argv[:3], *words))
    for name, value in vars(given_alone).items():
        if value is not None:
            assert getattr(read, name) == value, name
    assert (command.bind, command.port) == (read.host, read.port)
    if given_alone.speculative_num_draft_tokens is None:
        steps, topk = read.speculative_num_steps, read.speculative_eagle_topk
        # The first level holds topk nodes, each later one topk for each of topk survivors; and the root.
        whole = 1 + topk + (steps - 1) * topk * topk
        assert read.speculative_num_draft_tokens == (steps + 1 if topk == 1 else min(8, whole))


def test_a_flag_that_is_given_is_not_added_again():
    argv = compose(HEAD, MODEL, ["--speculative-num-steps", "5", "--speculative-draft-model=heads/one"]).argv
    assert [word.partition("=")[0] for word in argv].count("--speculative-num-steps") == 1
    assert not any(word.startswith("--speculative-draft-model-path") for word in argv)


def test_a_flag_cut_short_is_read_as_argparse_does():
    assert compose(HEAD, MODEL, ["--por", "7"]).port == 7
    assert "steps" in DRIVER.read(["--speculative-num-s", "3"]).given
    assert "steps" not in DRIVER.read(["--speculative-num", "3"]).given  # two flags begin so


@pytest.mark.parametrize(
    ("bind", "host"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.1.2.3", "10.1.2.3")]
)
def test_it_is_reached_from_this_machine(bind, host):
    command = compose(HEAD, MODEL, ["--host", bind, "--ssl-certfile", "c.pem"])
    assert (command.bind, command.url) == (bind, f"https://{host}:30000")


def test_a_config_file_counts_and_the_command_line_wins_over_it(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("port: 4001\nspeculative_num_steps: 2\nssl-certfile: c.pem\ndisable-cuda-graph: true\n")
    command = compose(HEAD, MODEL, ["--config", str(file), "--port", "4002"])
    assert command.url == "https://127.0.0.1:4002"
    assert "--speculative-num-steps" not in command.argv
    assert command.argv[command.argv.index("--speculative-num-draft-tokens") + 1] == "3"


@pytest.mark.parametrize(("text", "said"), [("- a\n- b\n", "holds list"), ("a: [", "cannot be read")])
def test_a_config_file_that_is_none(tmp_path, text, said):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    with pytest.raises(EngineError, match=said) as caught:
        compose(HEAD, MODEL, ["--config", str(file)])
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--speculative-draft-model-path", "heads/other"],
            "heads/one and --speculative-draft-model-path heads/oth",
        ),
        (["--model", "models/other"], "models/two and --model-path models/other"),
        (["--speculative-num-steps", "many"], "--speculative-num-steps is 'many'"),
        (["--speculative-eagle-topk", "0"], "--speculative-eagle-topk is '0'"),
        (["--port", "-1"], "--port is '-1'"),
        (["--nnodes", "2"], "--nnodes 2: ranks on other machines cannot report"),
        (["--smg-grpc-mode"], "gRPC server"),
        (["--encoder-only"], "an encoder"),
    ],
)
def test_flags_that_cannot_be_served_are_refused(words, said):
    with pytest.raises(EngineError) as caught:
        compose(HEAD, MODEL, words)
    assert said in str(caught.value)


def test_what_is_shown_runs_in_a_shell_and_keeps_secrets():
    command = compose(HEAD, Path("a model"), ["--api-key", "hush", "--admin-api-key=hush", "--dtype", "auto"])
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_STORE_TOKEN": "hush",
        "CAPTURE_HOOKS_SPEC": "embed, post.1",
        "HOME": "/home",
    }
    line = DRIVER.shown_command(command, environment)
    assert command.api_key == "hush"
    assert "hush" not in line
    assert "HOME" not in line
    words = shlex.split(line)
    settings = words[: words.index(sys.executable)]
    assert settings == [
        "CAPTURE_HOOKS_SPEC=embed, post.1",
        "SGLANG_STORE_TOKEN=***",
        "SGLANG_USE_CPU_ENGINE=1",
    ]
    hidden = tuple(word.replace("hush", "***") for word in command.argv)
    assert tuple(words[len(settings) :]) == hidden


def test_the_plain_command_is_sglangs_alone():
    words = DRIVER.plain(HEAD, MODEL)
    assert not any("capture" in word for word in words)
    read = sglang_reads((sys.executable, *words[1:]))
    assert (read.model_path, read.speculative_draft_model_path) == (str(MODEL), str(HEAD))


@pytest.mark.parametrize("words", [["--config", "f.yaml"], ["--config=f.yaml"], ["--conf", "f.yaml"]])
def test_a_config_file_cannot_be_given_to_both_servers(words):
    with pytest.raises(EngineError, match="--config FILE may hold"), DRIVER.decode(MODEL, None, words):
        pass


@pytest.mark.parametrize(
    "words",
    [["--api-key", "x"], ["--ssl-certfile=c.pem"], ["--nnodes", "2"], ["--port", "1"], ["--host", "h"]],
)
def test_a_server_for_others_is_refused(words):
    flag = words[0].partition("=")[0]
    with (
        pytest.raises(EngineError, match=f"{flag}: this server is asked"),
        DRIVER.running(MODEL, words, reports=False),
    ):
        pass
