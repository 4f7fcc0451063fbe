"""``docs/data.md``: its example is what the command prints."""

import re
from pathlib import Path

from transformers import LlamaConfig
from typer.testing import CliRunner

from capture_hooks.cli.app import build
from capture_hooks.testing import tiny

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_example_of_a_preview_is_what_it_prints(tmp_path, monkeypatch):
    rows = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1]
    command, shown = re.search(r"```console\n\$ capture-hooks (.*?)\n(.*?)```", PAGE, re.DOTALL).groups()
    (tmp_path / "talks.jsonl").write_text(rows, encoding="utf-8")
    LlamaConfig(vocab_size=tiny.VOCAB, max_position_embeddings=64).save_pretrained(tmp_path / "MODEL")
    tiny.tokenizer().save_pretrained(tmp_path / "MODEL")
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "90"}).invoke(build(), command.split(), catch_exceptions=False)
    assert [line.rstrip() for line in result.output.strip().splitlines()] == shown.strip().splitlines()
