"""Targets that write printable text and end their answers, and the answers that they should give."""

import string

import torch
from transformers import GenerationConfig

from capture_hooks.testing import tiny

PRINTABLE = string.ascii_letters + string.digits + " ,.?!\n"


def make_target(directory, tokenizer=None, *, ending=1.0, seed=2, **changes):
    """A random model whose output bias leaves printable bytes and the end, saved with its tokenizer."""
    tokenizer = tokenizer or tiny.tokenizer()
    model = tiny.model("phi", seed=seed, vocab_size=len(tokenizer), **changes)
    kept = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(letter))[0] for letter in PRINTABLE]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "self_attn" in name and parameter.ndim == 2:
                parameter.mul_(3.0)  # so that an answer depends on the whole prompt
        model.lm_head.bias.fill_(-100.0)
        model.lm_head.bias[kept] = 0.0
        model.lm_head.bias[tokenizer.eos_token_id] = ending
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model, tokenizer


def greedy(model, prompt, new):
    """The new tokens of `model.generate`, one prompt by itself."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=new,
        do_sample=False,
    )
    return made[0, len(prompt) :].tolist()


def prompt_of(tokenizer, messages, **variables):
    """What a server sends, by transformers alone."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
