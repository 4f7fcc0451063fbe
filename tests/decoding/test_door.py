"""Hugging Face's own door: ``model.generate(..., custom_generate=...)``."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer
from transformers.generation.streamers import BaseStreamer

from capture_hooks.decoding import SpeculativeDecoder
from capture_hooks.errors import DecodingError
from capture_hooks.testing import tiny

FIRST = 3
IDS = torch.tensor([[FIRST, 9, 40]])


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=2)


@pytest.fixture(scope="module")
def decoder(llama, knowing_head):
    return SpeculativeDecoder(llama, knowing_head(llama, FIRST, 0.9), 4)


class Recorder(BaseStreamer):
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended = True


class LongEnough(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 3 + 7)


def test_it_returns_what_generate_returns(llama, decoder):
    expected = llama.generate(IDS, do_sample=False, max_new_tokens=15)
    out = llama.generate(IDS, do_sample=False, max_new_tokens=15, custom_generate=decoder.custom_generate())
    assert torch.equal(out, expected)
    out = llama.generate(
        IDS, do_sample=False, max_new_tokens=15, return_dict_in_generate=True,
        custom_generate=decoder.custom_generate(),
    )  # fmt: skip
    assert torch.equal(out.sequences, expected)


def test_generation_config_and_stopping_criteria(llama, decoder):
    config = llama.generation_config.__class__(do_sample=False, max_new_tokens=15, repetition_penalty=1.4)
    stop = StoppingCriteriaList([LongEnough()])
    expected = llama.generate(IDS, generation_config=config, stopping_criteria=stop)
    assert expected.shape[1] == 10
    out = llama.generate(
        IDS, generation_config=config, stopping_criteria=stop, custom_generate=decoder.custom_generate()
    )
    assert torch.equal(out, expected)


def test_a_streamer_gets_the_prompt_then_each_token(llama, decoder):
    streamer = Recorder()
    door = decoder.custom_generate(streamer=streamer)
    out = llama.generate(IDS, do_sample=False, max_new_tokens=9, custom_generate=door)
    assert streamer.puts == [IDS[0].tolist()] + [[token] for token in out[0, 3:].tolist()]
    assert streamer.ended


def test_a_text_streamer(llama, decoder, capsys):
    tokenizer = tiny.tokenizer()
    door = decoder.custom_generate(streamer=TextStreamer(tokenizer, skip_prompt=True))
    out = llama.generate(IDS, do_sample=False, max_new_tokens=9, custom_generate=door)
    assert capsys.readouterr().out.strip() == tokenizer.decode(out[0, 3:]).strip()


def test_sampling_through_the_door_is_seeded(llama, decoder):
    def sample(seed):
        door = decoder.custom_generate(generator=torch.Generator().manual_seed(seed))
        return llama.generate(IDS, do_sample=True, max_new_tokens=9, custom_generate=door).tolist()

    assert sample(1) == sample(1) != sample(2)


def test_another_model_than_the_decoders_is_refused(decoder):
    other = tiny.llama(num_hidden_layers=2, seed=1)
    with pytest.raises(DecodingError, match="decodes another model"):
        other.generate(IDS, max_new_tokens=3, custom_generate=decoder.custom_generate())
