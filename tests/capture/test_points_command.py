"""``capture-hooks points``: from a config alone."""

import json

import pytest

from capture_hooks.cli import main
from capture_hooks.testing import tiny


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line; exit code, standard output, standard error."""

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["capture-hooks", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        printed = capsys.readouterr()
        return exited.value.code or 0, printed.out, printed.err

    return command


@pytest.fixture
def directory(tmp_path):
    """A model directory with a config and no weights."""
    tiny.llama(num_hidden_layers=3).config.save_pretrained(tmp_path)
    return tmp_path


def test_every_point_with_module_boundary_and_width(run, directory):
    code, out, _ = run("points", directory, "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["class"], report["layers"], report["hidden_size"]) == ("LlamaForCausalLM", 3, tiny.HIDDEN)
    rows = {row["point"]: row for row in report["points"]}
    assert list(rows) == ["embed", "pre.0", "post.0", "pre.1", "post.1", "pre.2", "post.2", "final_norm"]
    assert rows["post.1"] == {
        "point": "post.1",
        "boundary": 2,
        "module": "model.layers.1",
        "when": "after",
        "width": tiny.HIDDEN,
    }
    assert rows["final_norm"]["boundary"] is None
    assert rows["final_norm"]["module"] == "model.norm"


def test_the_table_says_the_same(run, directory):
    code, out, _ = run("points", directory)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "LlamaForCausalLM: 3 layers, 32 wide"
    assert lines[-1].split() == ["final_norm", "-", "after", "model.norm", "32"]
    assert len(lines) == 10


def test_modules_are_listed_on_request(run, directory):
    _, out, _ = run("points", directory, "--json", "--modules")
    rows = {row["point"]: row for row in json.loads(out)["points"]}
    assert rows["out:lm_head"]["width"] == tiny.VOCAB
    assert rows["in:model.layers.0.mlp.down_proj"]["width"] == 48
    assert rows["out:model.layers.0.mlp"]["width"] is None


def test_a_directory_without_a_model_is_one_clear_line(run, tmp_path):
    code, out, err = run("points", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: cannot load the model {tmp_path}")
    assert len(err.splitlines()) == 1
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    code, _, err = run("points", tmp_path)
    assert code == 1
    assert "is of type 'vit', for which this transformers" in err


def test_a_wrong_option_is_a_usage_error(run):
    assert run("points")[0] == 2
    assert run("points", "somewhere", "--frobnicate")[0] == 2
