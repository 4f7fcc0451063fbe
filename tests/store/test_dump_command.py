"""``capture-hooks dump`` as a user runs it: output, exit codes, one-line errors, nothing half-written."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from capture_hooks import CaptureSpec
from capture_hooks.cli.app import build
from capture_hooks.errors import CaptureHooksError, DataError, SpecError, StoreError
from capture_hooks.store import Dump, ModelStates, read_examples, write_dump
from capture_hooks.store.data import TemplateSettings
from capture_hooks.store.manifest import Manifest
from capture_hooks.testing import tiny

TALKS = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"hello {n}"}]}
    for n in range(5)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    tiny.llama(num_hidden_layers=8).save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(talk) + "\n" for talk in TALKS))
    return path


def arguments(model, data, out, *more):
    return ["dump", "--model", str(model), "--data", str(data), "--out", str(out), *map(str, more)]


def run(*parts):
    result = CliRunner().invoke(build(), arguments(*parts))
    if isinstance(result.exception, CaptureHooksError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_it_dumps_shows_the_cost_and_continues(model, data, tmp_path):
    out = tmp_path / "dump"
    shown = run(model, data, out, "--spec", "eagle3", "--estimate", "--device", "cpu")
    assert "eagle3 in a model of 8 layers: post.1, post.3, post.4" in shown
    assert "cost    about" in shown
    assert not out.exists()
    shown = run(model, data, out, "--spec", "post.1, post.3", "--device", "cpu", "--dtype", "bfloat16")
    assert "5 sequences" in shown
    assert f"saved {out}" in shown
    dump = Dump.open(out, CaptureSpec.parse("post.1, post.3"), verify=True)
    assert len(dump) == 5
    assert dump.manifest.dtype == "bfloat16"
    tokenizer = tiny.tokenizer()
    stored = dump[3]
    assert tokenizer.decode(stored.token_ids[stored.loss_mask]) == "hello 3<|im_end|>"
    again = run(model, data, out, "--spec", "post.1, post.3", "--device", "cpu", "--dtype", "bfloat16")
    assert "tokens are there already" in again


def test_a_spec_may_come_from_a_file(model, data, tmp_path):
    spec = CaptureSpec.parse("embed, post.-2 -> post.-1")
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    run(model, data, tmp_path / "d", "--spec", f"@{tmp_path / 'spec.json'}", "--limit", 2)
    dump = Dump.open(tmp_path / "d", spec)
    assert len(dump) == 2
    with pytest.raises(SpecError, match="cannot read the spec"):
        run(model, data, tmp_path / "e", "--spec", "@nothing.json")


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        (["--spec", "post.99"], SpecError, "outside a model of 8 layers"),
        (["--spec", "layer 3"], SpecError, "'layer 3' at position 0"),
        (["--spec", "post.1", "--max-length", "3"], DataError, "5 of 5 sequences are longer than 3 tokens"),
        (["--spec", "post.1", "--max-length", "999999"], DataError, "beyond the model's context of"),
        (["--spec", "post.1", "--split", "x"], DataError, "is a file, so there is no split 'x'"),
        (["--spec", "post.1", "--chat-template", "no.jinja"], DataError, "cannot read the chat template"),
    ],
)
def test_bad_requests_leave_nothing_behind(model, data, tmp_path, more, error, words):
    with pytest.raises(error) as caught:
        run(model, data, tmp_path / "d", *more)
    assert words in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_too_long_is_the_users_choice(model, data, tmp_path):
    shown = run(model, data, tmp_path / "d", "--spec", "post.1", "--max-length", 25, "--too-long", "truncate")
    assert "5 cut" in shown
    assert set(Dump.open(tmp_path / "d").lengths) == {25}


def test_another_spec_for_the_same_directory(model, data, tmp_path):
    run(model, data, tmp_path / "d", "--spec", "post.1")
    with pytest.raises(StoreError, match=r"spec: 'post.1' here, 'post.2' there"):
        run(model, data, tmp_path / "d", "--spec", "post.2")


def test_a_model_without_a_chat_template(data, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "base")
    tiny.tokenizer(None).save_pretrained(tmp_path / "base")
    with pytest.raises(DataError, match="has no chat template"):
        run(tmp_path / "base", data, tmp_path / "d", "--spec", "post.1")


def test_token_ids_need_no_tokenizer(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "bare")
    (tmp_path / "ids.jsonl").write_text('{"prompt_ids": [5, 6], "answer_ids": [7, 2]}\n')
    run(tmp_path / "bare", tmp_path / "ids.jsonl", tmp_path / "d", "--spec", "post.1")
    assert Dump.open(tmp_path / "d")[0].token_ids.tolist() == [5, 6, 7, 2]


def test_an_error_is_one_line_and_exit_code_1(model, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    command = arguments(model, empty, tmp_path / "d", "--spec", "post.1")
    done = subprocess.run(
        [sys.executable, "-c", "from capture_hooks.cli import main; main()", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == f"error: {empty} is an empty data set: it holds no record"
    assert not (tmp_path / "d").exists()


def test_a_dump_begun_yesterday_is_finished_with_yesterdays_date(tmp_path, data):
    """A chat template that reads the clock is told what it was told when the dump was begun."""
    model, out = tmp_path / "dated", tmp_path / "dump"
    tiny.llama().save_pretrained(model)
    dated = tiny.tokenizer("{{ strftime_now('%d %b %Y') }}\n" + tiny.CHATML)
    dated.save_pretrained(model)
    settings = TemplateSettings(clock="2024-07-04T10:00:00")
    examples = read_examples(data, dated, settings=settings)
    job = ModelStates(tiny.llama(), CaptureSpec.parse("post.1"), examples, shard_tokens=1)
    with pytest.raises(KeyboardInterrupt):
        write_dump(job, out, interrupting)
    begun = Manifest.read(out)
    assert 0 < begun.sequences < len(TALKS)
    assert begun.data.clock == "2024-07-04T10:00:00"
    run(model, data, out, "--spec", "post.1", "--device", "cpu", "--shard-tokens", 1)
    finished = Dump.open(out, verify=True)
    assert "04 Jul 2024" in dated.decode(finished[len(TALKS) - 1].token_ids)
    with pytest.raises(StoreError, match=r"holds another dump.*data"):
        run(model, data, out, "--spec", "post.1", "--shard-tokens", 1, "--limit", 3)


def interrupting(tokens):
    """Ctrl-C once two shards are being made."""
    if tokens > 60:
        raise KeyboardInterrupt


def test_what_the_reader_met_is_shown(model, tmp_path):
    path = tmp_path / "d.jsonl"
    rows = [TALKS[0] | {"id": 1}, {"messages": []}, TALKS[1] | {"id": 2}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = run(model, path, tmp_path / "dump", "--spec", "post.1", "--bad-rows", "skip")
    assert "columns not read: id (2)" in shown
    assert "left out 1 of 3 rows (33.33%)" in shown
    assert f"1 x not a conversation: first {path}:2" in shown
    assert "2 conversations, each in one sequence with all its turns" in shown


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--chat-template", "nothing"], "no chat template 'nothing'; it has default"),
        (["--chat-template", "nothing.jinja"], "cannot read the chat template nothing.jinja"),
        (["--template-arg", "think=1"], "reads no variable 'think'"),
        (["--turns", "all", "--chat-template", "FORGETFUL"], "rewrites earlier turns"),
    ],
)
def test_rendering_options_are_checked(model, tmp_path, more, words):
    forgetful = tmp_path / "f.jinja"
    forgetful.write_text(
        tiny.CHATML.replace(
            "message['content'] }}",
            "message['content'] }}{% if loop.last and message.role == 'assistant' %}.{% endif %}",
        )
    )
    talk = [*TALKS[0]["messages"], *TALKS[1]["messages"]]
    (tmp_path / "d.jsonl").write_text(json.dumps({"messages": talk}))
    more = [str(forgetful) if word == "FORGETFUL" else word for word in more]
    with pytest.raises(DataError, match=words):
        run(model, tmp_path / "d.jsonl", tmp_path / "dump", "--spec", "post.1", *more)
    assert not (tmp_path / "dump").exists()
