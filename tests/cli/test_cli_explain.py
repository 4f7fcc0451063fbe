"""``capture-hooks explain``: exit codes, JSON, bad input by name, and nothing lost at 80 columns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from typer.testing import CliRunner

from capture_hooks.cli._explain_view import show_all
from capture_hooks.cli.app import build
from capture_hooks.errors import CaptureHooksError
from capture_hooks.interop.explain import ExplainOptions, Report, explain_ids
from capture_hooks.plugins import registry

HEAD = str(Path(__file__).parents[2] / "examples" / "smollm2" / "head")
KIMI = ("--ids", "2,30,58", "--written-for", "sglang", "--family", "deepseek_v2", "--layers", "61")


def run(*words):
    """Exit code, output, and the error of a user's mistake."""
    result = CliRunner().invoke(build(["explain"]), ["explain", *words], env={"COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, CaptureHooksError), result.exception
    return result.exit_code, result.output, result.exception


def copied(tmp_path, config=(), name="config.json"):
    """Another library's head, with the shipped head's config and two weights, to be broken."""
    place = tmp_path / "head"
    place.mkdir()
    document = json.loads((Path(HEAD) / "config.json").read_text()) | dict(config)
    document.pop("capture")
    (place / name).write_text(json.dumps(document))
    weights = {"midlayer.hidden_norm.weight": torch.ones(576), "fc.weight": torch.ones(576, 3 * 576)}
    save_file(weights, place / "model.safetensors")
    return place


def test_what_is_asked_of_an_engine_is_the_exit_code():
    assert run(*KIMI)[0] == 0, "nothing is asked of any engine"
    assert run(*KIMI, "--engine", "sglang", "--engine", "vllm")[0] == 0
    assert run(*KIMI, "--engine", "sglang==0.5.12")[0] == 1
    assert run(*KIMI, "--engine", "sglang", "--engine", "modelopt")[0] == 1
    as_llama = [word if word != "deepseek_v2" else "llama" for word in KIMI]
    assert run(*as_llama, "--engine", "sglang")[0] == 0
    assert run(*as_llama, "--engine", "vllm")[0] == 1


def test_an_own_head_needs_nothing_said():
    code, output, _ = run(HEAD, "--engine", "vllm")
    assert code == 0
    assert "post.1" in output


def test_json_is_a_report():
    code, output, _ = run(*KIMI, "--json")
    report = Report.from_json(json.loads(output))
    assert (code, report.kind) == (0, "ids")
    assert {row.engine for row in report.rows} >= {"vllm.v1", "transformers"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ids", "2,x"], "2,x"),
        (["--ids", "1,,2"], "1,,2"),
        (["--ids", "1,2,"], "1,2,"),
        (["--ids", ""], "no list of integers"),
        ([HEAD, "--target", HEAD, "--family", "llama"], "--family and --layers"),
        ([HEAD, "--target", HEAD, "--layers", "9"], "--family and --layers"),
        (["--ids", "2", "--target", HEAD, "--layers", "9"], "--family and --layers"),
        ([HEAD, "--written-for", "sglang.deepseek"], "--written-for sglang.deepseek"),
        ([HEAD, "--spec", "post.1, post.2, post.3", "--written-for", "vllm"], "leave one of them out"),
        (["--ids", "2", "--layers", "0", "--family", "llama"], "0 layers"),
        (["--ids", "2", "--written-for", "acme", "--family", "llama", "--layers", "9"], "acme"),
        (["--ids", "2", "--written-for", "sglang", "--layers", "9"], "--family"),
        (["--ids", "2", "--spec", "post.x"], "post.x"),
        (["--ids", "2", "--spec", "post.20", "--layers", "9"], "9 layers"),
        ([*KIMI, "--engine", "acme"], "acme"),
        (["/nowhere"], "/nowhere"),
        ([HEAD, "--target", "/nowhere"], "/nowhere"),
        ([HEAD, "--ids", "2"], "--ids"),
        ([], "--ids"),
    ],
)
def test_a_mistake_is_named(words, message):
    code, output, error = run(*words)
    assert code in (1, 2)
    assert message in f"{output} {error}".replace("\n", " ")


def bomb(place):
    path = place / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def truncated(place):
    path = place / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def without_a_shard(place):
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    files = {"midlayer.hidden_norm.weight": "model-00001-of-00002.safetensors"}
    files["fc.weight"] = "model-00002-of-00002.safetensors"
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def a_pickle(place):
    (place / "model.safetensors").rename(place / "pytorch_model.bin")


def no_json(place):
    (place / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (bomb, "header of 1099511627776 bytes"),
        (truncated, "truncated"),
        (without_a_shard, "model-00002-of-00002.safetensors"),
        (a_pickle, "--pickles"),
        (no_json, "not JSON"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    place = copied(tmp_path)
    damage(place)
    code, _, error = run(str(place))
    assert code == 1
    assert message in str(error)


def test_a_head_of_unknown_architecture_is_explained(tmp_path):
    place = copied(tmp_path, {"architectures": ["Acme"], "draft_vocab_size": None})
    code, output, _ = run(str(place), "--family", "llama", "--layers", "30", "--json")
    found = [f for f in json.loads(output)["findings"] if f["check"] == "architecture.name"]
    assert {engine for f in found for engine in f["engines"]} == {"sglang", "vllm", "specforge"}
    assert code == 0


def columns(text):
    """The cells of a printed table by column, blanks removed."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split() == ["engine", "captures", "verdict"])
    at = [lines[start].index(name) for name in ("engine", "captures", "verdict")] + [None]
    cells = lines[start + 2 :]
    return [re.sub(r"\s", "", "".join(line[at[i] : at[i + 1]] for line in cells)) for i in range(3)]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "gpt_oss", "nobody's"])
def test_no_fact_is_cut(width, family):
    asked = ExplainOptions(family=family, layers=61, written_for="vllm")
    report = explain_ids([2, 30, 61], asked)
    report = report.model_copy(update={"rows": tuple(row for row in report.rows if row.asked == "ids")})
    console = Console(width=width, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    show_all(report, console)
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    engines, captures, verdicts = columns(text)
    for row in report.rows:
        assert re.sub(r"\s", "", f"{row.engine} {row.versions}") in engines
        assert row.rank == "verified" or f"read{row.read_on},notrun" in engines
        for state in row.captured or ():
            assert state.point in captures
        for fact in (*row.verdict.how, *row.silently):
            assert re.sub(r"\s", "", fact) in verdicts or fact == report.trained.by
        if row.instead and row.newest:
            assert re.sub(r"\s", "", row.instead) in re.sub(r"\s", "", text)


def test_the_versions_of_an_engine_that_do_the_same_are_one_line():
    config = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}}
    readers = [reader for reader in registry().readers.values() if reader.library == "sglang"]
    console = Console(width=80, record=True, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    show_all(
        explain_ids([2, 15, 27], ExplainOptions(family="llama", layers=30, written_for="sglang")), console
    )
    engines = columns(console.export_text().partition("when it reads this file:")[2])[0]
    same = {r.versions: r.read(config, "llama", 30).captured for r in readers}
    assert len(set(same.values())) == 2, "the story of this test: CUDA graphs ignored the ids up to 0.5.10"
    assert "sglang0.5.23" in engines
    assert "sglang0.5.11to0.5.22" in engines
    assert "sglang0.5.9to0.5.10" in engines


def test_piped_it_is_plain_text_of_80_columns():
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "FORCE_COLOR")}
    code = "from capture_hooks.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", *KIMI], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80
    assert "\x1b" not in done.stdout
    assert "post.1, post.29, post.57" in done.stdout
