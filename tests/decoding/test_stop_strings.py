"""Strings end an answer where they end `model.generate`'s, inside a speculated block too."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.decoding import SpeculativeDecoder, TreeShape
from capture_hooks.errors import DecodingError
from capture_hooks.testing import tiny

FIRST = 3
TOKENIZER = tiny.tokenizer()
#: Ids of a few letters: a random model says every string of two of them soon.
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcde"))
SETTINGS = {
    "do_sample": False,
    "max_new_tokens": 24,
    "eos_token_id": None,
    "pad_token_id": 0,
    "suppress_tokens": [i for i in range(tiny.VOCAB) if i not in LETTERS],
    "repetition_penalty": 1.8,
}


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=2)


def plain(model, ids, **arguments):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS | arguments)


STRINGS = st.lists(st.text("abcde", min_size=1, max_size=3), min_size=1, max_size=2)


@given(
    strings=STRINGS,
    seed=st.integers(0, 9),
    hit=st.sampled_from([0.6, 1.0]),
    tree=st.sampled_from([None, TreeShape(3, 2, 6)]),
)
@settings(max_examples=15, deadline=None)
def test_every_door_stops_where_generate_does(llama, knowing_head, strings, seed, hit, tree):
    draw = torch.Generator().manual_seed(seed)
    # The prompt ends in a letter: a string may begin in the prompt.
    ids = torch.tensor([[FIRST, *torch.randint(3, 250, (3,), generator=draw).tolist(), LETTERS[seed % 5]]])
    expected = plain(llama, ids, stop_strings=strings, tokenizer=TOKENIZER)
    head = knowing_head(llama, FIRST, hit)
    decoder = SpeculativeDecoder(llama, head, 5, tree, anatomy=head.anatomy)
    asked = {**SETTINGS, "tokenizer": TOKENIZER}
    assert torch.equal(decoder.generate(ids, **asked, stop_strings=strings).sequences, expected)
    config = copy.deepcopy(llama.generation_config)
    config.stop_strings = strings
    assert torch.equal(decoder.generate(ids, **asked, generation_config=config).sequences, expected)
    custom = decoder.custom_generate(tokenizer=TOKENIZER)
    assert torch.equal(plain(llama, ids, stop_strings=strings, custom_generate=custom), expected)


def test_a_string_can_end_in_the_middle_of_an_accepted_block(llama, knowing_head):
    ids = torch.tensor([[FIRST, 9, 40]])
    free = plain(llama, ids)[0, 3:]
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 1.0), 5)
    for end in range(2, 8):
        string = TOKENIZER.decode(free[end - 2 : end])
        answer = decoder.generate(ids, **SETTINGS, stop_strings=string, tokenizer=TOKENIZER).tokens
        assert TOKENIZER.decode(answer).endswith(string)
        assert TOKENIZER.decode(answer).count(string) == 1
        assert answer.tolist() == free[: len(answer)].tolist()


def test_the_models_own_config_counts_and_an_argument_overrides_it(knowing_head):
    model, ids = tiny.llama(num_hidden_layers=2), torch.tensor([[FIRST, 9, 40]])
    head = knowing_head(model, FIRST, 0.8)
    decoder = SpeculativeDecoder(model, head, 4, anatomy=head.anatomy)
    free = plain(model, ids)
    model.generation_config.stop_strings = [TOKENIZER.decode(free[0, 5:7])]
    expected = plain(model, ids, tokenizer=TOKENIZER)
    assert expected.shape[1] < free.shape[1]
    assert torch.equal(decoder.generate(ids, **SETTINGS, tokenizer=TOKENIZER).sequences, expected)
    assert torch.equal(decoder.generate(ids, **SETTINGS, stop_strings=None).sequences, free)
    assert model.generation_config.stop_strings is not None


def test_what_needs_a_tokenizer_says_so(llama, knowing_head):
    ids = torch.tensor([[FIRST, 9, 40]])
    head = knowing_head(llama, FIRST, 0.8)
    decoder = SpeculativeDecoder(llama, head, 4, anatomy=head.anatomy)
    with pytest.raises(DecodingError, match=r"stop_strings=\['ab'\] needs the target's tokenizer"):
        decoder.generate(ids, **SETTINGS, stop_strings=["ab"])
    with pytest.raises(DecodingError, match="needs the target's tokenizer"):
        plain(llama, ids, stop_strings=["ab"], custom_generate=decoder.custom_generate())
    with pytest.raises(DecodingError, match="token_healing=True is not supported"):
        decoder.generate(ids, **SETTINGS, token_healing=True, tokenizer=TOKENIZER)
