"""Decoding past the lengths at which a target computes otherwise, and as its class feeds itself."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from capture_hooks.decoding import SpeculativeDecoder, TreeShape
from capture_hooks.errors import DecodingError
from capture_hooks.testing import tiny

FIRST = 3
LIMIT = 24  # where the RoPE of these models changes
SMALL = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    name: tiny.model(name, num_hidden_layers=2)
    for name in ("llama_longrope", "phi3_longrope", "llama_dynamic")
}
FRESH = copy.deepcopy(MODELS)


def other(model_type, **settings):
    """A tiny random model of a family that `tiny` does not have."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SMALL | settings))
        tiny.randomise(model)
    return model.eval()


def prompt(length, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor([[FIRST]]), torch.randint(3, 250, (1, length - 1), generator=draw)], 1)


# The penalty keeps a random model from saying one token for ever.
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": 1.5}


def plain(model, ids, **arguments):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | arguments)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=6, deadline=None)
@given(
    length=st.integers(1, LIMIT + 6),
    new=st.integers(2, 24),
    tree=st.sampled_from([None, TreeShape(3, 2, 6)]),
    seed=st.integers(0, 99),
)
def test_past_the_limit_the_text_is_generates(knowing_head, name, length, new, tree, seed):
    model, ids = MODELS[name], prompt(length, seed)
    expected = plain(copy.deepcopy(FRESH[name]), ids, max_new_tokens=new)
    # Drafts good below the limit, since the head reads the target's logits without a cache.
    head = knowing_head(model, FIRST, 0.9)
    head.check_states = False
    decoder = SpeculativeDecoder(model, head, 4, tree, anatomy=head.anatomy)
    result = decoder.generate(ids, new, **GREEDY)
    assert torch.equal(result.sequences, expected)
    custom = plain(model, ids, max_new_tokens=new, custom_generate=decoder.custom_generate())
    assert torch.equal(custom, expected)


@pytest.mark.parametrize("name", ["llama_longrope", "phi3_longrope"])
def test_drafts_are_accepted_on_both_sides_of_the_limit(knowing_head, name):
    model = MODELS[name]
    head = knowing_head(model, FIRST, 1.0)
    head.check_states = False
    for length in (4, LIMIT + 1):
        stats = SpeculativeDecoder(model, head, 4).generate(prompt(length, 1), 16, do_sample=False).stats
        assert sum(stats.accepted) > 0.5 * stats.drafted > 0


@pytest.mark.parametrize(
    "model_type", ["roberta", "xlm-roberta", "camembert", "data2vec-text", "xmod", "roberta-prelayernorm"]
)
def test_a_family_with_positions_of_its_own_gets_generates(knowing_head, model_type):
    languages = {"default_language": "en_XX"} if model_type == "xmod" else {}
    model = other(model_type, is_decoder=True, **languages)
    ids = prompt(5, 0)
    head = knowing_head(model, FIRST, 0.8)
    head.check_states = False  # a forward without position ids counts otherwise
    result = SpeculativeDecoder(model, head, 4).generate(ids, 20, **GREEDY)
    assert torch.equal(result.sequences, plain(model, ids, max_new_tokens=20))


def test_position_ids_of_the_request_are_used(knowing_head):
    model, ids = tiny.llama(num_hidden_layers=2), prompt(6, 2)
    positions = torch.tensor([[0, 1, 2, 10, 11, 30]])
    arguments = {"position_ids": positions, "max_new_tokens": 12}
    expected = plain(model, ids, **arguments)
    assert not torch.equal(expected, plain(model, ids, max_new_tokens=12))
    for tree in (None, TreeShape(3, 2, 6)):
        head = knowing_head(model, FIRST, 0.8)
        head.check_states = False
        decoder = SpeculativeDecoder(model, head, 4, tree)
        result = decoder.generate(ids, **GREEDY, **arguments)
        assert torch.equal(result.sequences, expected)


def test_a_class_that_forgets_what_it_has_read_is_refused_before_any_token(knowing_head):
    audio = {"num_blocks": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = other(
        "phi4_multimodal",
        original_max_position_embeddings=LIMIT,
        audio_config=audio,
        vision_config=vision,
    )
    head = knowing_head(model, FIRST, 0.8)
    head.check_states = False
    decoder = SpeculativeDecoder(model, head, 4)
    message = "Phi4MultimodalForCausalLM drops its cache between 20 and 29 tokens"
    with pytest.raises(DecodingError, match=message):
        next(decoder.stream(prompt(20, 0), 10, do_sample=False))
    for length, new in ((12, 12), (LIMIT + 1, 8)):  # on one side
        ids = prompt(length, 0)
        result = decoder.generate(ids, new, **GREEDY)
        assert torch.equal(result.sequences, plain(model, ids, max_new_tokens=new))


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("doge", {"keep_window_size": 8}),
        ("moshi", {"sliding_window": 8, "ffn_dim": 48, "head_dim": 8}),
        ("bloom", {}),
    ],
)
def test_where_a_pass_over_several_tokens_is_another_computation_they_go_one_by_one(
    knowing_head, model_type, settings
):
    model, ids = other(model_type, **settings), prompt(5, 1)
    head = knowing_head(model, FIRST, 0.9)
    head.check_states = False
    result = SpeculativeDecoder(model, head, 4).generate(ids, 24, **GREEDY)
    assert torch.equal(result.sequences, plain(model, ids, max_new_tokens=24))


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("minimax", {"num_local_experts": 4}, "MiniMaxForCausalLM does not run on a key/value cache"),
        ("xlstm", {"num_heads": 4}, "xLSTMForCausalLM does not run on a key/value cache"),
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8}, "cannot be rolled back"),
        ("jamba", {"mamba_d_state": 8}, "cannot be rolled back|does not run on a key/value cache"),
    ],
)
def test_a_target_without_such_a_cache_is_refused_when_the_decoder_is_made(
    knowing_head, model_type, settings, message
):
    model = other(model_type, **settings)
    with pytest.raises(DecodingError, match=message):
        SpeculativeDecoder(model, knowing_head(model, FIRST, 0.5), 3)
