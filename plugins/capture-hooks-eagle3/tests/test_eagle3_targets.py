"""Heads for targets whose settings vary by layer, or hold for a part of the channels."""

from __future__ import annotations

import pytest
import torch
from capture_hooks_eagle3.config import Eagle3Config
from transformers import AutoConfig, AutoModelForCausalLM

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.decoding import SpeculativeDecoder
from capture_hooks.errors import HeadError
from capture_hooks.heads import load_head, make_witness, readout_of, save_head
from capture_hooks.heads.contract import TrainBatch
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

SMALL = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA4 = {
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 8,
    "vocab_size_per_layer_input": tiny.VOCAB,
    "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def target(model_type, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | settings))
        tiny.randomise(model)
    return model.eval()


def made(model, **settings):
    provider, anatomy = registry().heads["eagle3"], find_anatomy(model)
    spec = CaptureSpec.parse("embed, post.1, post.2").absolute(anatomy.n_layers)
    ids = torch.arange(0, anatomy.vocab_size, 2)
    config = Eagle3Config(**settings)
    return provider.create(config, spec, anatomy, readout_of(anatomy, spec), ids)


def learns(model, head):
    """The head's loss over real states of its target, with gradients."""
    ids = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), bind(model, head.spec, target=True) as capture:
        model(ids[None], use_cache=False)
    states = capture.states
    loss = head(
        TrainBatch(states.packed, states.target, ids, torch.ones(40).bool(), torch.tensor([0, 40]))
    ).mean()
    loss.backward()
    return bool(torch.isfinite(loss)) and all(
        torch.isfinite(p.grad).all() for p in head.parameters() if p.grad is not None
    )


TARGETS = {
    "gemma4": lambda: target("gemma4_text", **GEMMA4),
    "phi-4-mini": lambda: tiny.model("phi3_longrope"),
    "longrope": lambda: tiny.model("llama_longrope"),
    "dynamic": lambda: tiny.model("llama_dynamic"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_such_a_target_has_a_head_that_learns_is_saved_and_drafts(tmp_path, name):
    model = TARGETS[name]()
    head = made(model)
    assert learns(model, head)
    anatomy = find_anatomy(model)
    witness = make_witness(model, head.spec, [torch.arange(3, 40)])
    save_head(head.eval(), tmp_path / "head", model=model, witness=witness)
    again = load_head(tmp_path / "head", model)
    ids = torch.tensor([[3, 9, 40, 7, 12]])
    settings = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    answer = SpeculativeDecoder(model, again, 3, anatomy=anatomy).generate(ids, **settings)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert torch.equal(answer.sequences, expected)


def test_settings_that_vary_by_layer_are_those_of_the_last_layer_of_full_attention():
    model = target("gemma4_text", **GEMMA4)
    layer = model.config.per_layer_config[3]
    config = made(model).config
    assert (config.head_dim, config.kv_heads) == (layer.head_dim, layer.num_key_value_heads) == (16, 2)
    theta = model.config.rope_parameters["full_attention"]["rope_theta"]
    assert config.rope == {"rope_type": "default", "rope_theta": theta}


def test_factors_for_a_part_of_the_channels_are_left_out_and_for_all_are_kept():
    partly, wholly = tiny.model("phi3_longrope"), tiny.model("llama_longrope")
    theta = partly.config.rope_parameters["rope_theta"]
    assert made(partly).config.rope == {"rope_type": "default", "rope_theta": theta}
    kept = made(wholly).config.rope
    assert kept["short_factor"] == wholly.config.rope_parameters["short_factor"]


def test_factors_given_for_another_width_are_refused():
    model = tiny.llama()
    rope = dict(tiny.model("llama_longrope").config.rope_parameters)
    with pytest.raises(
        HeadError, match="short_factor lists 4 factors, but a head of head_dim 16 turns 8 pairs"
    ):
        made(model, rope=rope, head_dim=16)


def test_a_kind_of_layer_that_the_target_does_not_have_gives_no_rope():
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0}, "full_attention": None}
    model = target("beam", layer_types=["sliding_attention"] * 4, rope_parameters=kinds, sliding_window=8)
    assert made(model).config.rope == {"rope_type": "default", "rope_theta": 500.0}
