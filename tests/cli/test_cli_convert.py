"""``capture-hooks convert`` as it is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from capture_hooks.capture import find_anatomy
from capture_hooks.cli.app import build
from capture_hooks.errors import HeadError, StoreError
from capture_hooks.heads import load_head, make_witness, readout_of, save_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Example, Examples, ModelStates, write_dump
from capture_hooks.testing import tiny

SHIPPED = Path(__file__).parents[2] / "examples" / "smollm2" / "head"
SPEC = "post.2, post.15, post.27"


def command(*words):
    words = ["convert", *map(str, words)]
    return CliRunner().invoke(build(words), words)


def as_typed(*words):
    """In a process of its own: exit code and streams."""
    done = subprocess.run(
        [sys.executable, "-c", "from capture_hooks.cli import main; main()", "convert", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"},
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    place = tmp_path_factory.mktemp("target")
    model = tiny.llama(num_hidden_layers=8)
    model.save_pretrained(place)
    return model, place


def test_the_shipped_head_and_back_without_its_target(tmp_path):
    """It carries its target's fingerprint, so nothing else is needed to leave; the ids need their library."""
    done = command(SHIPPED, tmp_path / "eagle", "--to", "specforge")
    assert done.exit_code == 0, done.output
    assert f"capture-hooks head, eats {SPEC}" in done.output
    assert "as eagle" in done.output
    assert "left behind: the capture section and the witness" in done.output
    ours, theirs = load_file(SHIPPED / "model.safetensors"), load_file(tmp_path / "eagle/model.safetensors")
    assert ours.keys() == theirs.keys()
    code, out, error = as_typed(tmp_path / "eagle", tmp_path / "again", "--to", "modelopt")
    assert (code, out) == (1, "")
    assert "does not say what its target is; name it (--target)" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "again").exists()


def test_a_head_becomes_ours_and_works(target, tmp_path):
    model, place = target
    spec, anatomy = CaptureSpec.parse("post.1, post.3, post.5"), find_anatomy(model)
    provider = registry().heads["eagle3"]
    ids = torch.arange(0, 200, 2)
    head = provider.create(provider.config_type(), spec, anatomy, readout_of(anatomy, spec), ids)
    sequences = [[(3 * i + s) % 250 for i in range(20)] for s in range(3)]
    save_head(head, tmp_path / "own", model=model, witness=make_witness(model, spec, sequences))
    assert command(tmp_path / "own", tmp_path / "sp", "--to", "speculators", "--target", place).exit_code == 0
    written = json.loads((tmp_path / "sp" / "config.json").read_text())
    assert written["speculators_config"]["verifier"] == {
        "name_or_path": str(place),
        "architectures": ["LlamaForCausalLM"],
    }
    data = tmp_path / "data.jsonl"
    records = [{"prompt_ids": ids[:4], "answer_ids": ids[4:]} for ids in sequences]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = (tmp_path / "sp", tmp_path / "ours", "--to", "capture-hooks")
    assert command(*words).exit_code == 2
    done = command(*words, "--target", place, "--data", data)
    assert done.exit_code == 0, done.output
    assert load_head(tmp_path / "ours", model).spec.resolve(8) == spec.resolve(8)
    taken = command(*words, "--target", place).exception
    assert isinstance(taken, HeadError)
    assert "already holds a head" in str(taken)
    assert command(*words, "--target", place, "--overwrite").exit_code == 0


def test_a_loss_is_refused_and_forced(tmp_path, target):
    command(SHIPPED, tmp_path / "eagle", "--to", "eagle")
    path = tmp_path / "eagle" / "config.json"
    config = json.loads(path.read_text())
    config["eagle_config"].pop("norm_output")
    path.write_text(json.dumps({**config, "norm_output": False}))
    write_llama_config(tmp_path / "target")
    words = (tmp_path / "eagle", tmp_path / "out", "--to", "speculators", "--target", tmp_path / "target",
             "--written-for", "specforge")  # fmt: skip
    code, out, error = as_typed(*words)
    assert (code, out) == (1, "")
    assert "cannot be converted to speculators exactly" in error
    assert "- lm_head reads the output without norm" in error
    code, out, error = as_typed(*words, "--force")
    assert (code, error) == (0, "")
    assert "lost: lm_head reads the output without norm" in out


def write_llama_config(place):
    """The shipped head's target, config alone: --target needs no weights but for our own layout."""
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        num_hidden_layers=30,
        hidden_size=576,
        vocab_size=49152,
        num_attention_heads=9,
        num_key_value_heads=3,
    ).save_pretrained(place)


def test_a_dump_goes_to_the_dumps_converter(target, tmp_path):
    ids = torch.arange(20)
    write_dump(
        ModelStates(
            target[0],
            CaptureSpec.parse("post.1, post.3, post.5"),
            Examples("x", (Example(ids, ids >= 3, "x"),)),
        ),
        tmp_path / "dump",
    )
    # Its last state is normed, as SpecForge's is.
    done = command(tmp_path / "dump", tmp_path / "out", "--to", "specforge")
    assert done.exit_code == 0, done.exception
    assert "capture-hooks dump, 1 sequences, 20 tokens, post.1, post.3, post.5" in done.output
    assert f"saved {tmp_path / 'out'} as specforge, float32" in done.output
    again = command(tmp_path / "out", tmp_path / "again", "--to", "capture-hooks").exception
    assert isinstance(again, StoreError)
    assert "--pickles" in str(again)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "eagle", "--last", "normed"), "--last makes no sense there"),
        (("--to", "eagle", "--ids", "1,2", "--masks", "all"), "--ids, --masks makes no sense there"),
        ((), "Missing option '--to'"),
    ],
)
def test_options_that_make_no_sense(tmp_path, words, said):
    done = command(SHIPPED, tmp_path / "out", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_options_of_heads_for_no_head(tmp_path):
    done = command(tmp_path, tmp_path / "out", "--to", "vllm", "--force")
    assert done.exit_code == 2
    assert "--force makes no sense there" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "gguf"), "no layout of heads is called 'gguf'; there are capture-hooks, eagle, modelopt"),
        (
            ("--to", "eagle", "--spec", "post.1, post.2, post.3"),
            "the spec given is post.1, post.2, post.3",
        ),
        (("--to", "eagle", "--target", "nowhere-at-all"), "cannot load the model nowhere-at-all"),
    ],
)
def test_what_cannot_be_done_is_one_message(tmp_path, words, said):
    code, out, error = as_typed(SHIPPED, tmp_path / "out", *words)
    assert (code, out) == (1, "")
    assert said in error
    assert "Traceback" not in error


def test_help_fits_80_columns():
    code, out, _ = as_typed("--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    for word in ("--written-for", "--accept-unverified", "Heads only", "Dumps only", "exit code 1"):
        assert word in out
