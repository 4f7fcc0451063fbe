"""``capture-hooks data regenerate``: against `model.generate` turn by turn, and killed at any moment."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import chat_templates
import datasets
import pytest
import torch
from answering_targets import greedy, make_target, prompt_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from capture_hooks.cli.app import build
from capture_hooks.decoding.answering import EmbeddedGeneration, Regeneration
from capture_hooks.decoding.answering.journal import journal
from capture_hooks.decoding.contract import PromptRequest, Sampling
from capture_hooks.errors import CaptureHooksError, DataError, DecodingError, StoreError
from capture_hooks.store import read_examples
from capture_hooks.store.data import TemplateSettings
from capture_hooks.testing import tiny

NEW = 24
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": None, "n": [1, 2]}}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


ROWS = [
    {"id": 1, "messages": [user("hi"), assistant("old")]},
    {
        "messages": [user("one"), assistant("old"), user("two, longer than that"), assistant("old")],
        "source": "a",
    },
    {"messages": [user("a question that nobody has answered")]},
    {
        "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "old"}],
        "system": "be brief",
    },
    {"prompt": "complete", "completion": "old"},
    {"messages": [user("q"), assistant("kept", weight=0), user("and?"), assistant("old"), user("so?")]},
    {"messages": [assistant("welcome"), user("thanks"), assistant("old")]},
    {"instruction": "add", "input": "1 2", "output": "old"},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "target"
    model, tokenizer = make_target(directory)
    return directory, model, tokenizer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data.jsonl", ROWS)


def read(path):
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    return [json.loads(line) for line in lines]


def run(target, data, out, *more):
    words = ["data", "regenerate", str(data), "--model", str(target[0]), "--out", str(out)]
    words += ["--max-new-tokens", str(NEW), "--batch-size", "3", "--device", "cpu", *map(str, more)]
    result = CliRunner().invoke(build(), words)
    if isinstance(result.exception, CaptureHooksError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def job_of(target, data, out, sampling=None, **more):
    _, model, tokenizer = target
    sampling = sampling or Sampling(temperature=1.0, ends=(tokenizer.eos_token_id,))
    arguments = {"max_new_tokens": NEW, "unfinished": "keep", "identity": {}, **more}
    return Regeneration(
        str(data), out, tokenizer, sampling=sampling, template=TemplateSettings(), **arguments
    ), EmbeddedGeneration(model, sampling, 3)


def asked_again(target, messages):
    """The conversation with the answers of `model.generate`, turn by turn, by hand."""
    _, model, tokenizer = target
    made = []
    turns = [*messages] if messages[-1]["role"] == "assistant" else [*messages, assistant("")]
    for at, message in enumerate(turns):
        if message["role"] == "assistant" and at > 0 and message.get("weight") != 0:
            ids = greedy(model, prompt_of(tokenizer, made), NEW)
            text = tokenizer.decode(ids, skip_special_tokens=False).removesuffix("<|im_end|>")
            message = assistant(text)
        made.append(message)
    return made


def test_every_turn_is_what_generate_says_to_a_servers_prompt(target, data, tmp_path):
    out = tmp_path / "out.jsonl"
    shown = run(target, data, out, "--unfinished", "keep")
    assert shown.startswith("answers greedy (the target's generation_config); at most 24 tokens each\n")
    assert "8 rows, 10 answers to write" in shown
    assert "stay as they are: 1 of weight 0, 1 that open a conversation" in shown
    wanted = [row.get("messages") for row in ROWS]
    wanted[3] = [{"role": "system", "content": "be brief"}, user("x"), assistant("old")]
    wanted[4] = [user("complete"), assistant("old")]
    wanted[7] = [user("add\n1 2"), assistant("old")]
    found = read(out)
    assert [row["messages"] for row in found] == [asked_again(target, messages) for messages in wanted]
    # Columns that are no part of a conversation are carried over, and none of the old ones are left.
    assert [sorted(row.keys() - {"messages"}) for row in found] == [["id"], ["source"], *[[]] * 6]
    assert not list(tmp_path.glob("*.partial"))
    assert not list(tmp_path.glob("*.unfinished"))


def test_what_is_learnt_of_the_file_is_what_the_target_wrote(target, data, tmp_path):
    _, model, tokenizer = target
    out = tmp_path / "out.jsonl"
    job, engine = job_of(target, data, out)
    made = job.run(engine)
    assert made.fits.keys() <= {"exact", "without its end"}
    assert made.fits["exact"] >= 4
    assert sum(made.fits.values()) == made.answers == 10
    # Greedily, by a file of prompts alone: learnt tokens are generate's, the end included.
    questions = write(tmp_path / "q.jsonl", [{"prompt": f"question {n}"} for n in range(12)])
    out = tmp_path / "greedy.jsonl"
    job, engine = job_of(target, questions, out, Sampling(ends=(tokenizer.eos_token_id,)))
    assert job.run(engine).rows == 12
    ended = 0
    for n, example in enumerate(read_examples(out, tokenizer)):
        written = greedy(model, prompt_of(tokenizer, [user(f"question {n}")]), NEW)
        learnt = example.token_ids[example.loss_mask].tolist()
        if written[-1] == tokenizer.eos_token_id:
            assert learnt == written
            ended += 1
        else:
            assert learnt[:-1] == written
    assert 0 < ended < 12


def test_tools_and_what_they_said_stay(tmp_path):
    tokenizer = chat_templates.tokenizer("qwen2_5")
    target = (tmp_path / "target", *make_target(tmp_path / "target", tokenizer, max_position_embeddings=2048))
    messages = [
        user("look!"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "nothing", "tool_call_id": "c1"},
        assistant("old"),
    ]
    data = write(
        tmp_path / "data.jsonl",
        [{"messages": messages, "tools": TOOLS}, {"messages": messages[:2], "tools": TOOLS, "id": 3}],
    )
    out = tmp_path / "out.jsonl"
    shown = run(target, data, out, "--unfinished", "keep", "--max-new-tokens", 7)
    assert "stay as they are: 2 with tool calls" in shown
    assert "1 rows have no answer to write and stay as they are" in shown
    first, second = read(out)
    assert first["messages"][:3] == messages[:3]
    assert first["tools"] == TOOLS
    prompt = prompt_of(tokenizer, messages[:3], tools=TOOLS)
    answer = greedy(target[1], prompt, 7)
    assert first["messages"][3]["content"] == tokenizer.decode(answer).removesuffix("<|im_end|>")
    assert second == {"messages": messages[:2], "tools": TOOLS, "id": 3}


def test_the_row_says_what_the_template_was_told(tmp_path):
    """Training reads the file without the options that it was made with."""
    tokenizer = chat_templates.tokenizer("qwen3")
    target = (tmp_path / "target", *make_target(tmp_path / "target", tokenizer, max_position_embeddings=512))
    out = tmp_path / "out.jsonl"
    told = ("--template-arg", "enable_thinking=false", "--unfinished", "keep")
    run(target, write(tmp_path / "data.jsonl", [{"prompt": f"q {n}"} for n in range(4)]), out, *told)
    for n, (row, example) in enumerate(zip(read(out), read_examples(out, tokenizer), strict=True)):
        assert row["chat_template_kwargs"] == {"enable_thinking": False}
        prompt = prompt_of(tokenizer, [user(f"q {n}")], enable_thinking=False)
        assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
        written = greedy(target[1], prompt, NEW)
        assert example.token_ids.tolist()[: len(prompt) + len(written)] == [*prompt, *written]


def test_a_datasets_folder_gives_the_file_that_json_lines_give(tmp_path):
    """Its None padding goes; what JSON lines leave out is not there."""
    tokenizer = chat_templates.tokenizer("qwen2_5")
    target = (tmp_path / "target", *make_target(tmp_path / "target", tokenizer, max_position_embeddings=2048))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    rows = [
        {"messages": [user("look!"), assistant("", tool_calls=[call])], "tools": TOOLS, "id": 1},
        {"messages": [user("hi"), assistant("old")], "id": 2},
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "folder"))
    lines = write(tmp_path / "data.jsonl", rows)
    for data, out in ((tmp_path / "folder", "a.jsonl"), (lines, "b.jsonl")):
        run(target, data, tmp_path / out, "--unfinished", "keep", "--max-new-tokens", 5)
    assert read(tmp_path / "a.jsonl") == read(tmp_path / "b.jsonl")
    assert "null" not in (tmp_path / "a.jsonl").read_text()


def test_token_ids_are_answered_by_token_ids(target, tmp_path):
    _, model, _tokenizer = target
    asked = [[5, 9, 30], [40, 41], [7, 8, 9, 10, 11]]
    rows = [
        {"prompt_ids": asked[0], "answer_ids": [60, 2], "split": "train"},
        {"prompt_ids": asked[1]},
        {"input_ids": [*asked[2], 60, 2, 50, 51, 61, 2, 52], "loss_mask": [0] * 5 + [1, 1, 0, 0, 1, 0, 0]},
    ]
    out = tmp_path / "out.jsonl.gz"
    shown = run(target, write(tmp_path / "ids.jsonl", rows), out, "--unfinished", "keep")
    assert "token for token" in shown
    first, second, third = read(out)
    assert first == {"prompt_ids": asked[0], "answer_ids": greedy(model, asked[0], NEW), "split": "train"}
    assert second == {"prompt_ids": asked[1], "answer_ids": greedy(model, asked[1], NEW)}
    one = greedy(model, asked[2], NEW)
    before = [*asked[2], *one, 50, 51]
    two = greedy(model, before, NEW)
    behind = [52] if two[-1] == 2 else [2, 52]  # the old end stood behind the mask
    assert third["input_ids"] == [*before, *two, *behind]
    mask = [0] * 5 + [1] * len(one) + [0, 0] + [1] * len(two) + [0] * len(behind)
    assert third["loss_mask"] == mask


@pytest.mark.parametrize("unfinished", ["drop", "keep"])
def test_an_answer_that_reaches_the_limit(target, tmp_path, unfinished):
    _, model, tokenizer = target
    rows = [
        {"messages": [user(f"q {n}"), assistant("old"), user("and?"), assistant("old")]}
        for n in (0, 1, 3, 9, 16)
    ]
    out = tmp_path / "out.jsonl"
    shown = run(target, write(tmp_path / "data.jsonl", rows), out, "--unfinished", unfinished)
    wanted = []
    for row in rows:
        made = []
        for question in (row["messages"][0], row["messages"][2]):
            ids = greedy(model, prompt_of(tokenizer, [*made, question]), NEW)
            if unfinished == "drop" and ids[-1] != tokenizer.eos_token_id:
                break
            made += [question, assistant(tokenizer.decode(ids).removesuffix("<|im_end|>"))]
        if made:
            wanted.append({"messages": made})
    found = read(out)
    assert found == wanted
    if unfinished == "drop":
        assert 0 < len(found) < 5
        assert any(len(row["messages"]) == 2 for row in found)
        assert f"{5 - len(found)} rows left out, because no answer is left in them" in shown
        assert "reached the limit of tokens: dropped with what followed them" in shown
    else:
        assert "and with an end that it did not write" in shown


def test_a_prompt_beyond_the_context_is_not_asked(tmp_path):
    target = (tmp_path / "target", *make_target(tmp_path / "target", max_position_embeddings=64))
    rows = [{"messages": [user("x" * n), assistant("old")]} for n in (4, 30, 80)]
    out = tmp_path / "out.jsonl"
    shown = run(target, write(tmp_path / "data.jsonl", rows), out, "--unfinished", "keep")
    assert "1 answers (33.3%) had a prompt beyond the context" in shown
    for row, n in zip(read(out), (4, 30), strict=True):
        prompt = prompt_of(target[2], [user("x" * n)])
        ids = greedy(target[1], prompt, min(NEW, 64 - len(prompt)))
        assert row["messages"][1]["content"] == target[2].decode(ids).removesuffix("<|im_end|>")


class Stopped(EmbeddedGeneration):
    """Ends like a process that is killed: after some lists of answers, whatever was to follow."""

    after = 0

    def answers(self, dialogues):
        for number, group in enumerate(super().answers(dialogues)):
            if number == self.after:
                raise KeyboardInterrupt
            yield group
            self.asked = getattr(self, "asked", 0) + sum(answer is not None for _, answer in group)


@settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    after=st.integers(0, 8),
    torn=st.integers(0, 400),
    temperature=st.sampled_from([0.0, 1.0]),
    at_once=st.sampled_from([3, 3, 5]),
)
def test_stopped_anywhere_and_torn_anywhere_it_ends_the_same(
    target, tmp_path_factory, after, torn, temperature, at_once
):
    folder = tmp_path_factory.mktemp("stopped")
    data = write(folder / "data.jsonl", ROWS)
    sampling = Sampling(temperature=temperature, ends=(2,))
    job, engine = job_of(target, data, folder / "whole.jsonl", sampling)
    whole = job.run(engine)
    out = folder / "out.jsonl"
    engine = Stopped(target[1], sampling, 3)
    engine.after = after
    try:
        job_of(target, data, out, sampling)[0].run(engine)
    except KeyboardInterrupt:
        assert not out.exists()
        partial = out.with_name("out.jsonl.partial")
        size = partial.stat().st_size
        with partial.open("r+b") as file:
            file.truncate(max(0, size - torn))
        known = sum(
            b'"row"' in line and line.endswith(b"\n") for line in partial.read_bytes().splitlines(True)
        )
        engine = Stopped(target[1], sampling, at_once)
        engine.after = -1
        job = job_of(target, data, out, sampling)[0]
        assert job.left <= 10 - known
        made = job.run(engine)
        assert made.answers == whole.answers == 10
        # What was known is not asked again, but for what ran in one pass with an answer that was torn off.
        assert getattr(engine, "asked", 0) <= 10 - known
        if at_once != 3:
            return  # other prompts ran together: rounding may decide otherwise
        assert made == whole
    assert out.read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_killed_and_started_again_it_is_the_file_of_one_run(target, tmp_path):
    data = write(
        tmp_path / "data.jsonl",
        [{"messages": [user(f"{n}"), assistant("o"), user("?"), assistant("o")]} for n in range(16)],
    )
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    more = ("--temperature", "1", "--seed", "7", "--unfinished", "keep")
    run(target, data, whole, *more)
    words = ["data", "regenerate", str(data), "--model", str(target[0]), "--out", str(out)]
    words += ["--max-new-tokens", str(NEW), "--batch-size", "3", "--device", "cpu", *more]
    command = [sys.executable, "-c", "from capture_hooks.cli import main; main()", *words]
    partial = tmp_path / "out.jsonl.partial"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if partial.exists() and partial.read_bytes().count(b"\n") > 10:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    assert partial.exists()
    known = sum(b'"row"' in line for line in partial.read_bytes().splitlines())
    with pytest.raises(StoreError, match=r"begun with another seed \(7, not 8\)"):
        run(target, data, out, *(more[:3]), "8", *more[4:])
    again = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})
    assert again.returncode == 0, again.stderr
    assert f"; {known} are there already" in again.stdout
    assert out.read_bytes() == whole.read_bytes()
    manifests = [json.loads(p.with_name(f"{p.name}.manifest.json").read_text()) for p in (out, whole)]
    assert manifests[0]["counts"] == manifests[1]["counts"]
    assert manifests[0]["settings"]["seed"] == 7
    assert len(manifests[0]["engines"]) == 1
    assert "is finished" in run(target, data, out, *more)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_new_tokens": NEW + 1}, "max_new_tokens"),
        ({"seed": 1}, "seed"),
        ({"unfinished": "drop"}, "unfinished"),
        ({"sampling": Sampling(temperature=0.5, ends=(2,))}, "temperature"),
        ({"sampling": Sampling(temperature=1.0, top_k=4, ends=(2,))}, "top_k"),
        ({"limit": 3}, "data"),
        ({"identity": {"model": "b"}}, "model"),
    ],
)
def test_other_settings_are_refused_by_name(target, data, tmp_path, changes, named):
    out = tmp_path / "out.jsonl"
    engine = Stopped(target[1], Sampling(temperature=1.0, ends=(2,)), 3)
    engine.after = 1
    with pytest.raises(KeyboardInterrupt):
        job_of(target, data, out)[0].run(engine)
    with pytest.raises(StoreError, match=f"begun with another {named}.* another --out"):
        job_of(target, data, out, **changes)[0].run(engine)
    job, engine = job_of(target, data, out)
    job.run(engine)
    with pytest.raises(StoreError, match=f"begun with another {named}"):
        _ = job_of(target, data, out, **changes)[0].is_finished


def test_what_cannot_be_done_is_one_error(target, data, tmp_path):
    good = tmp_path / "out.jsonl"
    for out, message in (
        (tmp_path / "out.txt", "end its name in .jsonl"),
        (tmp_path / "no" / "out.jsonl", "is not a directory"),
        (data, "is the data itself"),
    ):
        with pytest.raises(StoreError, match=message):
            run(target, data, out)
    good.write_text("mine\n")
    with pytest.raises(StoreError, match="was not made here"):
        run(target, data, good)
    assert good.read_text() == "mine\n"
    good.unlink()
    with pytest.raises(DecodingError, match=r"top_p 0\.5 changes nothing without a temperature"):
        run(target, data, good, "--top-p", "0.5")
    with pytest.raises(DecodingError, match=r"top_p 1\.5 is not between"):
        run(target, data, good, "--top-p", "1.5", "--temperature", "1")
    with pytest.raises(DataError, match=r"text.jsonl:1: 'text' is taken as it is"):
        run(target, write(tmp_path / "text.jsonl", [{"text": "x"}]), good)
    with pytest.raises(DataError, match="holds no record"):
        run(target, write(tmp_path / "empty.jsonl", []), good)
    picture = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "what?"}]
    with pytest.raises(DataError, match="answers are written to text alone"):
        run(target, write(tmp_path / "images.jsonl", [{"messages": [user(picture)]}]), good)
    assert not list(tmp_path.glob("out.jsonl*"))


def test_two_at_a_time_are_refused(target, data, tmp_path):
    job, engine = job_of(target, data, tmp_path / "out.jsonl")
    with journal(job.out, job.settings), pytest.raises(StoreError, match="another process is writing it"):
        job.run(engine)


def test_rows_that_cannot_be_used_are_counted(target, tmp_path):
    rows = [{"text": "x"}, {"messages": [user("hi"), assistant("old")]}, {"messages": [{"role": 3}]}]
    data = write(tmp_path / "data.jsonl", rows)
    out = tmp_path / "out.jsonl"
    shown = run(target, data, out, "--bad-rows", "skip", "--unfinished", "keep")
    assert "1 rows left out: text without a question: first " in shown
    assert "1 rows left out: not a role: first " in shown
    assert len(read(out)) == 1


def test_a_row_that_an_earlier_run_left_out_is_an_error_again(target, tmp_path):
    rows = [{"messages": [user("hi")]}, {"prompt_ids": [5, 10**6]}, {"messages": [user("so?")]}]
    data, out = write(tmp_path / "data.jsonl", rows), tmp_path / "out.jsonl"
    engine = Stopped(target[1], Sampling(temperature=1.0, ends=(2,)), 1)
    engine.after = 1
    with pytest.raises(KeyboardInterrupt):
        job_of(target, data, out, bad_rows="skip", vocab_size=259)[0].run(engine)
    job, engine = job_of(target, data, out, vocab_size=259)
    with pytest.raises(DataError, match=r"data\.jsonl:2: a token outside the vocabulary"):
        job.run(engine)
    assert not out.exists()
    made = job_of(target, data, out, bad_rows="skip", vocab_size=259)[0].run(engine)
    assert (made.rows, [bad.reason for bad in made.bad]) == (2, ["a token outside the vocabulary"])


def test_an_estimate_writes_nothing(target, data, tmp_path):
    before = sorted(tmp_path.iterdir())
    shown = run(target, data, tmp_path / "out.jsonl", "--estimate")
    assert "cost    10 answers: about " in shown
    assert " if they are as long as the data's (4 tokens), about " in shown
    assert " if all have 24 tokens; " in shown
    assert sorted(tmp_path.iterdir()) == before


def test_the_targets_own_sampling(target, data, tmp_path):
    (tmp_path / "target").mkdir()
    for file in target[0].iterdir():
        (tmp_path / "target" / file.name).write_bytes(file.read_bytes())
    config = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    config |= {"eos_token_id": [2, 5], "no_repeat_ngram_size": 3}
    (tmp_path / "target" / "generation_config.json").write_text(json.dumps(config))
    own = (tmp_path / "target", *target[1:])
    out = tmp_path / "out.jsonl"
    shown = run(own, data, out, "--unfinished", "keep")
    assert shown.startswith(
        "answers sampled at temperature 0.7, top-k 20, top-p 0.8, repetition penalty 1.05 (the target's "
        "generation_config), seed 0; at most 24 tokens each\n"
        "        the target's generation_config also sets no_repeat_ngram_size: not applied\n"
    )
    kept = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"]
    assert kept["ends"] == [2, 5]
    assert kept["repetition_penalty"] == 1.05
    assert kept["top_k"] == 20
    (tmp_path / "target" / "generation_config.json").write_text("{")
    with pytest.raises(CaptureHooksError, match=r"generation_config\.json"):
        run(own, data, tmp_path / "other.jsonl")


class Once:
    """One prompt."""

    finished = False

    def __init__(self, prompt, seed=0, new=NEW):
        self._asked = PromptRequest(tuple(prompt), new, seed)

    def asks(self):
        asked, self._asked = self._asked, None
        return asked


def answered(engine, dialogues):
    found = {id(d): list(answer.token_ids) for group in engine.answers(dialogues) for d, answer in group}
    return [found[id(d)] for d in dialogues]


@pytest.mark.parametrize(
    "family",
    ["gpt2", "gemma3_text", "mamba", "opt", "bloom", "llama_longrope", "llama_dynamic", "phi3_longrope"],
)
def test_prompts_of_several_lengths_are_answered_as_each_alone(family):
    """Absolute positions, windows, a recurrent state, ALiBi, and frequencies that go by the longest row."""
    model = tiny.model(family)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 7, 0
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 90, (n,), generator=generator).tolist() for n in (3, 9, 9, 17, 30)]
    engine = EmbeddedGeneration(model, Sampling(ends=(7,)), 8)
    assert ("one length" in engine.settings["batch"]) == ("longrope" in family or "dynamic" in family)
    assert answered(engine, [Once(p, new=14) for p in prompts]) == [greedy(model, p, 14) for p in prompts]
    assert model.generation_config.eos_token_id == 7


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.8), Sampling(temperature=1.3, top_k=9, top_p=0.9)]
)
def test_samples_have_the_targets_distribution(target, sampling):
    """Of the first token, against transformers' own processors on a plain forward; 5 standard deviations."""
    from transformers.generation.logits_process import (
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    model, prompt, count = target[1], [5, 9, 30], 3000
    engine = EmbeddedGeneration(model, sampling, 500)
    tokens = [ids[0] for ids in answered(engine, [Once(prompt, seed, 1) for seed in range(count)])]
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[:, -1].double()
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = TopPLogitsWarper(sampling.top_p)(None, TopKLogitsWarper(sampling.top_k)(None, scores))
    wanted = scores.softmax(-1)[0]
    found = torch.bincount(torch.tensor(tokens), minlength=len(wanted)) / count
    assert not found[wanted == 0].any()
    assert ((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()


def test_a_draw_does_not_depend_on_batch_mates(target):
    model = target[1]
    sampling = Sampling(temperature=1.0, ends=(2,))
    prompts = [[5, 9, 30 + n] for n in range(8)]
    together = answered(EmbeddedGeneration(model, sampling, 8), [Once(p, s) for s, p in enumerate(prompts)])
    alone = answered(EmbeddedGeneration(model, sampling, 1), [Once(p, s) for s, p in enumerate(prompts)])
    assert together == alone
    assert len({tuple(ids) for ids in together}) > 4
