"""Data with images through ``dump`` and ``train`` as they are typed, from a vision model's directory."""

import json

import pytest
from typer.testing import CliRunner

from capture_hooks.cli.app import build
from capture_hooks.errors import DataError, ModelError, StoreError
from capture_hooks.store import Dump
from capture_hooks.testing import tiny, tiny_vision
from capture_hooks.training import run_directory

pytest.importorskip("PIL", reason="images need pillow")


@pytest.fixture(scope="module", params=["llava", "gemma3"])  # Qwen's processors load with torchvision alone
def folder(request, tmp_path_factory):
    """A model's directory, and beside it a data file with images."""
    path = tmp_path_factory.mktemp(request.param)
    tiny.model(request.param).save_pretrained(path / "model")
    tiny_vision.processor(request.param).save_pretrained(path / "model")
    rows = []
    for seed in range(8):
        tiny_vision.picture(seed).save(path / f"{seed}.png")
        parts = [{"type": "image", "image": f"{seed}.png"}, {"type": "text", "text": f"what is {seed}?"}]
        answer = {"role": "assistant", "content": "a cat" * seed + "."}
        rows.append({"messages": [{"role": "user", "content": parts}, answer]})
    (path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


def run(*words):
    words = [*map(str, words)]
    result = CliRunner().invoke(build(words), words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_dump_and_train(folder, tmp_path):
    options = ("--model", folder / "model", "--device", "cpu")
    spec = ("--spec", "post.1, post.3, post.4")
    run("dump", *options, *spec, "--data", folder / "data.jsonl", "--out", tmp_path / "dump")
    dump = Dump.open(tmp_path / "dump", verify=True)
    assert len(dump) == 8
    shown = dump.sequence(3).token_ids == 260
    assert shown.sum() == 4
    assert not (dump.sequence(3).loss_mask & shown).any()
    how = ("--steps", 2, "--batch-tokens", 150, "--held-out", 0.2)
    run("train", *options, *how, "--dump", tmp_path / "dump", "--out", tmp_path / "offline")
    run("train", *options, *how, *spec, "--data", folder / "data.jsonl", "--out", tmp_path / "online")
    offline, online = (
        [json.loads(line) for line in (run_directory(tmp_path / name) / "log.jsonl").read_text().splitlines()]
        for name in ("offline", "online")
    )
    losses = [[entry["loss"] for entry in log if "loss" in entry] for log in (offline, online)]
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    more = ("--data", folder / "data.jsonl", "--limit", 2, "--max-new-tokens", 8, "--json")
    report = json.loads(run("eval", *options, "--head", tmp_path / "offline", *more))
    assert report["identical"] == 2
    assert sum(report["offline"]["rows"]) > 0
    # The same command continues nothing of other images.
    (folder / "kept.png").write_bytes((folder / "2.png").read_bytes())
    tiny_vision.picture(99).save(folder / "2.png")
    try:
        with pytest.raises(StoreError, match="data: "):
            run("dump", *options, *spec, "--data", folder / "data.jsonl", "--out", tmp_path / "dump")
    finally:
        (folder / "kept.png").rename(folder / "2.png")


def test_preview(folder):
    words = ("--model", folder / "model", "--json")
    shown = json.loads(run("data", "preview", folder / "data.jsonl", *words))
    assert "images: 8" in json.dumps(shown)
    # One row is shown whole; one that cannot be used says why.
    assert "a cat" in run("data", "preview", folder / "data.jsonl", "--model", folder / "model", "--row", 2)
    rows = [
        *(folder / "data.jsonl").read_text().splitlines(),
        '{"messages": [{"role": "user", "content": '
        '[{"type": "image", "image": "none.png"}]}, {"role": "assistant", "content": "?"}]}',
    ]
    (folder / "more.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"more\.jsonl:9: cannot read the image .*none\.png"):
        run("data", "preview", folder / "more.jsonl", "--model", folder / "model", "--row", 9)


def test_what_is_not_done_with_images_is_refused(folder, tmp_path):
    model, data = folder / "model", folder / "data.jsonl"
    words = ("--model", model, "--data", data, "--out", tmp_path / "dump", "--spec", "post.1")
    with pytest.raises(DataError, match="8 of 8 sequences have images, which are not sent to vllm"):
        run("dump", *words, "--engine", "vllm")
    assert not (tmp_path / "dump").exists()


def test_a_processor_that_is_missing(folder, tmp_path):
    bare = tmp_path / "model"
    tiny.model("llava").save_pretrained(bare)
    tiny_vision.tokenizer("llava").save_pretrained(bare)
    words = ("--model", bare, "--data", folder / "data.jsonl", "--out", tmp_path / "dump", "--spec", "post.1")
    with pytest.raises(ModelError, match="model"):
        run("dump", *words)
    assert not (tmp_path / "dump").exists()
