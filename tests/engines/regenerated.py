"""Conversations that an engine answers again, against `model.generate`, one prompt at a time."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import GenerationConfig

from capture_hooks.decoding.answering import Regeneration
from capture_hooks.store.data import TemplateSettings
from capture_hooks.testing import tiny

CLI = [sys.executable, "-c", "from capture_hooks.cli import main; main()"]
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
