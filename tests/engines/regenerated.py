"""Conversations that an engine answers again, and what `model.generate` answers, one prompt at a time."""

import json

import torch
from transformers import GenerationConfig

from capture_hooks.decoding.answering import Regeneration
from capture_hooks.store.data import TemplateSettings
from capture_hooks.testing import tiny

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


def job(data, out, sampling):
    """The job of one file."""
    return Regeneration(
        str(data),
        out,
        tiny.tokenizer(),
        sampling=sampling,
        max_new_tokens=NEW,
        unfinished="keep",
        template=TemplateSettings(),
        identity={},
    )


def interrupted(made, engine, after):
    """Run a job and stop it when ``after`` answers are there."""

    def stop(answers, tokens):
        if answers >= after:
            raise KeyboardInterrupt

    try:
        made.run(engine, stop)
    except KeyboardInterrupt:
        return
    raise AssertionError("it was not interrupted")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
