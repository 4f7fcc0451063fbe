"""Multimodal targets with text alone: every command opens them, and decoding gives the model's own text."""

import json
import sys
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForImageTextToText

from capture_hooks.capture import find_anatomy
from capture_hooks.cli import main
from capture_hooks.decoding import SpeculativeDecoder
from capture_hooks.heads import readout_of
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump
from capture_hooks.testing import tiny

FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4")
SPEC = "embed, post.0, post.1"
IDS = torch.tensor([[5, 9, 40, 77]])


def own_head(model):
    """A random head that drafts some of the model's own tokens."""
    provider, anatomy = registry().heads["eagle3"], find_anatomy(model)
    spec = CaptureSpec.parse(SPEC)
    ids = torch.arange(anatomy.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return provider.create(provider.config_type(), spec, anatomy, readout_of(anatomy, spec), ids).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_decoded_as_the_model_itself_does(family):
    model = tiny.model(family, num_hidden_layers=2)
    decoder = SpeculativeDecoder(model, own_head(model), 4)
    for settings in ({}, {"repetition_penalty": 1.3}):
        expected = model.generate(IDS, do_sample=False, max_new_tokens=24, **settings)
        assert torch.equal(decoder.generate(IDS, 24, do_sample=False, **settings).sequences, expected)
        through = model.generate(
            IDS, do_sample=False, max_new_tokens=24, custom_generate=decoder.custom_generate(), **settings
        )
        assert torch.equal(through, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_dumped_trained_on_evaluated_and_answered(tmp_path, monkeypatch, capsys, family):
    def command(*words):
        monkeypatch.setattr(sys, "argv", ["capture-hooks", *map(str, words)])
        with suppress(SystemExit):
            main()
        printed = capsys.readouterr()
        assert "error" not in printed.err, printed.err
        return printed.out

    model, data = tmp_path / "model", tmp_path / "data.jsonl"
    tiny.model(family, num_hidden_layers=2).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    texts = ["a first line", "and a second, longer one", "the third"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    command("dump", "--model", model, "--spec", SPEC, "--data", data, "--out", tmp_path / "dump")
    itself = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    found = find_anatomy(itself)
    dump = Dump.open(tmp_path / "dump")
    for sequence in (dump[i] for i in range(len(texts))):
        with torch.no_grad():
            out = itself(
                input_ids=sequence.token_ids[None].long(), use_cache=False, output_hidden_states=True
            )
        # hidden_states[k] is boundary k, but for the last one, which is normed.
        width = found.hidden_size
        for index, state in enumerate(out.hidden_states[:2]):
            ours = sequence.states[:, index * width : (index + 1) * width]
            torch.testing.assert_close(ours, state[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(sequence.argmax.long(), out.logits[0].argmax(-1))

    common = ("--model", model, "--steps", 2, "--device", "cpu", "--evaluations", 0)
    command("train", *common, "--dump", tmp_path / "dump", "--out", tmp_path / "head")
    command("train", *common, "--data", data, "--spec", SPEC, "--out", tmp_path / "online")
    for head in (tmp_path / "online",):
        report = command(
            "eval", "--model", model, "--head", head, "--data", data, "--max-new-tokens", 12, "--json"
        )
        assert json.loads(report)["lossless"]
    assert command(
        "generate", "--model", model, "--head", tmp_path / "head", "--prompt", "hi", "--max-new-tokens", 6
    )
