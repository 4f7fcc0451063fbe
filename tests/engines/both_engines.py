"""What SGLang and vLLM are both held to: dumps, reports of a head, answers written again, a served head."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from capture_hooks.decoding.answering import Regeneration
from capture_hooks.store.data import TemplateSettings
from capture_hooks.testing import tiny

CLI = [sys.executable, "-c", "from capture_hooks.cli import main; main()"]
COMMAND = Path(sys.executable).with_name("capture-hooks")
ROOT = Path(__file__).parents[2]
#: The target of the demo, and the head that ships with it.
MODEL, HEAD = ROOT / "build" / "smollm2", ROOT / "examples" / "smollm2" / "head"
#: Seconds for anything that a busy machine of two cores may be slow at.
LONG = 600


# -- dumps: against the embedded engine's --------------------------------------------------------------


def write_records(path, lengths):
    """Random sequences of those lengths."""
    source = random.Random(0)
    records = [
        {"input_ids": [source.randrange(3, tiny.VOCAB) for _ in range(n)], "loss_mask": [1] * n}
        for n in lengths
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def check_equal(dump, reference, engine, count):
    """``count`` sequences; fields but for the engine's are the same, states within float32's noise."""
    ours, theirs = dump.manifest.model_dump(), reference.manifest.model_dump()
    assert dump.manifest.engine.name == engine
    for manifest in (ours, theirs):
        for name in ("engine", "batch_tokens", "shards"):
            manifest.pop(name)
    assert ours == theirs
    assert [s.lengths for s in dump.manifest.shards] == [s.lengths for s in reference.manifest.shards]
    assert len(dump) == len(reference) == count
    worst = 0.0
    for mine, other in zip(dump, reference, strict=True):
        assert torch.equal(mine.token_ids, other.token_ids)
        assert torch.equal(mine.loss_mask, other.loss_mask)
        assert torch.equal(mine.argmax, other.argmax)
        for a, b in ((mine.states, other.states), (mine.target, other.target)):
            assert a.dtype == b.dtype == torch.float32
            worst = max(worst, float((a.double() - b.double()).abs().max() / b.double().abs().max()))
    assert worst < 1e-5
    print(f"largest relative difference from the embedded engine's: {worst:.1e}")


# -- reports of a head: against the embedded decoder's ---------------------------------------------------


def evaluate(data, environment, *words):
    """The report of ``eval`` over ``data``, at most 40 new tokens each."""
    command = [*CLI, "eval", "--model", str(MODEL), "--head", str(HEAD)]
    command += ["--data", str(data), "--max-new-tokens", "40", "--json", *words]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def check_report(report, engine, prompts, steps, embedded):
    """A report over so many prompts, with chains of ``steps`` drafts; the embedded decoder's decoding."""
    decoding = report["decoding"]
    assert report["identical"] == report["prompts"] == prompts
    assert report["lossless"]
    assert report["settings"]["engine"] == engine
    # Every round gains its accepted drafts and one token of the target's own; the last may be cut.
    gained = decoding["rounds"] + sum(decoding["accepted"])
    assert 0 <= gained - decoding["tokens"] <= steps * prompts
    assert decoding["reached"][0] == decoding["rounds"]
    assert decoding["reached"][1:] == decoding["accepted"][:-1]
    assert decoding["drafted"] == steps * decoding["rounds"]
    assert decoding["acceptance_length"] > 1.2
    for name in ("tokens_per_second", "plain_tokens_per_second", "speedup", "break_even"):
        assert report[name] > 0
    assert decoding["acceptance_length"] == pytest.approx(embedded["acceptance_length"], rel=0.05)


# -- answers written again: against `model.generate`, one prompt at a time --------------------------------

NEW, TALKS = 20, 12
END = 2  # of `tiny.tokenizer`


def make_talker(model, folder):
    """Let a tiny model end its answers now and then; saved in ``folder`` with a tokenizer."""
    with torch.no_grad():
        model.lm_head.weight[END] *= 2.5
        model.lm_head.weight[259:] = 0.0  # ids that the tokenizer does not know
    model.config.eos_token_id = END
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=0)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return model


def write_talks(path):
    """Two questions each."""
    talks = [
        [
            {"role": "user", "content": f"question {n}"},
            {"role": "assistant", "content": "old"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "old"},
        ]
        for n in range(TALKS)
    ]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def check_command(engine, folder, model, words, environment):
    """The command's answers are those of `by_hand`; conversations and target lie in ``folder``."""
    out = folder / "greedy.jsonl"
    command = [*CLI, "data", "regenerate", str(folder / "talks.jsonl"), "--model", str(folder / "model")]
    command += ["--out", str(out), "--max-new-tokens", str(NEW), "--unfinished", "keep"]
    command += ["--engine", engine, "--", *words]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"data    {TALKS} rows, {2 * TALKS} answers to write" in run.stdout
    assert f"engine  {engine} " in run.stdout
    assert read(out) == by_hand(model)


def by_hand(model):
    """All conversations as `model.generate` answers them."""
    tokenizer = tiny.tokenizer()
    made = []
    for n in range(TALKS):
        messages = []
        for question in (f"question {n}", "and?"):
            messages.append({"role": "user", "content": question})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
            new = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
            )
            answer = tokenizer.decode(new[0, ids.shape[1] :]).removesuffix("<|im_end|>")
            messages.append({"role": "assistant", "content": answer})
        made.append({"messages": messages})
    return made


def job(folder, out, sampling):
    """The job that writes one file."""
    return Regeneration(
        str(folder / "talks.jsonl"),
        folder / out,
        tiny.tokenizer(),
        sampling=sampling,
        max_new_tokens=NEW,
        unfinished="keep",
        template=TemplateSettings(),
        identity={},
    )


def interrupted(folder, out, sampling, engine, after=7):
    """Stop a job when ``after`` answers are there, and finish it."""

    def stop(answers, tokens):
        if answers >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(folder, out, sampling).run(engine, stop)
    again = job(folder, out, sampling)
    assert after <= 2 * TALKS - again.left < 2 * TALKS
    done = again.run(engine)
    assert done.answers == 2 * TALKS
    rows = read(folder / out)
    assert len({message["content"] for row in rows for message in row["messages"][1::2]}) > TALKS
    return done


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- a head that is served ---------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def short_directory():
    """A directory for temporary files whose path leaves room for the sockets that engines put there."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        yield Path(directory)


def greedy_answer(model, question, tokens):
    """By plain greedy decoding of the Hugging Face model in a directory."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    turns = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = target.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@dataclass
class Serving:
    """A running command that serves, its output in a file."""

    process: subprocess.Popen
    log: Path
    port: int

    def ask(self, model, question, tokens, **how):
        import openai

        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", timeout=LONG)
        turns = [{"role": "user", "content": question}]
        how = {"temperature": 0, "max_tokens": tokens, **how}
        return client.chat.completions.create(model=model, messages=turns, **how)

    def text(self):
        return self.log.read_text(errors="replace")

    def told(self):
        return [line for line in self.text().splitlines() if line.startswith("capture-hooks: ")]

    def wait_for(self, said):
        deadline = time.monotonic() + LONG
        while said not in self.text():
            assert self.process.poll() is None, self.text()[-4000:]
            assert time.monotonic() < deadline, self.text()[-4000:]
            time.sleep(0.5)

    def stop(self, number, patience=0):
        """Signal it; the exit code, once everything it started is gone too, some seconds later at most."""
        import psutil

        started = psutil.Process(self.process.pid).children(recursive=True)
        assert len(started) >= 3  # the server, and what it starts
        self.process.send_signal(number)
        code = self.process.wait(LONG)
        _, alive = psutil.wait_procs(started, timeout=patience)
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
        return code


@contextlib.contextmanager
def serving(words, temporary, port, environment):
    """Start a command; what is still running at the end is stopped."""
    log = temporary / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(word) for word in words],
            env={**os.environ, "TMPDIR": str(temporary), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield Serving(process, log, port)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(LONG)
