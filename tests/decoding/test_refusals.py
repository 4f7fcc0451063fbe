"""What cannot be served losslessly is refused in one clear line."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from capture_hooks.decoding import SpeculativeDecoder, TreeShape
from capture_hooks.errors import DecodingError
from capture_hooks.testing import tiny

FIRST = 3
IDS = torch.tensor([[FIRST, 9, 40]])


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=2)


@pytest.fixture(scope="module")
def decoder(llama, knowing_head):
    return SpeculativeDecoder(llama, knowing_head(llama, FIRST, 0.8), 3)


class Counting(LogitsProcessor):
    """Depends on how often it was called."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.roll(self.calls, -1)


class LastToken(LogitsProcessor):
    """Depends on the tokens so far alone."""

    depends_only_on_prefix = True

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -1:], torch.full((len(scores), 1), 3.0))


@pytest.mark.parametrize(
    ("ids", "arguments", "message"),
    [
        (IDS.expand(2, -1), {}, "one sequence at a time, not a batch of 2"),
        (IDS, {"num_beams": 2}, "'beam_search' is not supported"),
        (IDS, {"do_sample": True, "num_return_sequences": 2}, "not a batch of 2"),
        (IDS, {"use_cache": False}, "use_cache=False"),
        (IDS, {"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
        (IDS, {"attention_mask": torch.tensor([[0, 1, 1]])}, "remove the padding"),
        (IDS, {"logits_processor": LogitsProcessorList([Counting()])}, "Counting may carry state"),
        (IDS, {"prefix_allowed_tokens_fn": lambda batch, ids: [4, 5]}, "PrefixConstrained.* may carry state"),
        (IDS, {"max_new_tokens": 1000}, "context of 256: ask for at most 253 new tokens"),
        (torch.full((1, 300), 5), {}, "context of 256: shorten the prompt"),
        (torch.empty(1, 0, dtype=torch.long), {}, "the prompt is empty"),
    ],
)
def test_requests(decoder, ids, arguments, message):
    with pytest.raises(DecodingError, match=message):
        decoder.generate(ids, **{"max_new_tokens": 5, **arguments})


def test_a_filled_cache_is_refused(llama, decoder):
    cache = llama(IDS, use_cache=True)
    filled = getattr(cache, "cache", None) or cache.past_key_values
    name = "cache" if hasattr(cache, "cache") else "past_key_values"
    with pytest.raises(DecodingError, match="already holds 3 tokens"):
        decoder.generate(torch.cat([IDS, IDS], 1), 5, **{name: filled})


def test_a_processor_that_declares_itself_is_served(llama, decoder):
    processors = LogitsProcessorList([LastToken()])
    expected = llama.generate(IDS, do_sample=False, max_new_tokens=12, logits_processor=processors)
    result = decoder.generate(IDS, 12, do_sample=False, logits_processor=processors)
    assert torch.equal(result.sequences, expected)


def test_a_head_for_another_target(llama, knowing_head):
    deeper = tiny.llama(num_hidden_layers=3)
    with pytest.raises(DecodingError, match="target of 3 layers, this model has 2"):
        SpeculativeDecoder(llama, knowing_head(deeper, FIRST, 1.0))
    with pytest.raises(DecodingError, match="target of 2 layers, this model has 3"):
        SpeculativeDecoder(deeper, knowing_head(llama, FIRST, 1.0))
    smaller = tiny.llama(num_hidden_layers=2, vocab_size=100)
    with pytest.raises(DecodingError, match="drafts token id 271, outside this target's vocabulary of 100"):
        SpeculativeDecoder(smaller, knowing_head(llama, FIRST, 1.0))


def test_an_eagle3_head_of_another_width(llama, eagle3_head):
    wider = tiny.llama(num_hidden_layers=2, hidden_size=64)
    with pytest.raises(DecodingError, match="cannot take this target's states"):
        SpeculativeDecoder(llama, eagle3_head(wider))


@pytest.mark.parametrize(
    "arguments",
    [
        {"draft_tokens": 0},
        {"min_confidence": 1.0},
        {"kernels": "packed", "dtype": torch.bfloat16},
    ],
)
def test_settings(llama, knowing_head, arguments):
    arguments = dict(arguments)
    model = llama
    if dtype := arguments.pop("dtype", None):
        model = tiny.llama(num_hidden_layers=2).to(dtype)
    with pytest.raises(DecodingError):
        SpeculativeDecoder(model, knowing_head(llama, FIRST, 1.0), **arguments)


def test_a_tree_of_nothing():
    with pytest.raises(DecodingError, match="tree branch must be from 1 to 65536, not 0"):
        TreeShape(branch=0)
    with pytest.raises(DecodingError, match="tree size must be from 1 to 65536, not 10000000000"):
        TreeShape(size=10**10)


def test_a_tree_over_a_sliding_window(knowing_head):
    model = tiny.model("gemma2", num_hidden_layers=2)
    with pytest.raises(DecodingError, match=r"SlidingWindowLayer.* use a chain"):
        SpeculativeDecoder(model, knowing_head(model, FIRST, 1.0), tree=TreeShape())


def test_a_tree_where_positions_come_from_the_mask(knowing_head):
    """BLOOM makes its position biases of the two-dimensional mask, so a tree mask misleads it."""
    config = AutoConfig.for_model(
        "bloom", vocab_size=64, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    head = knowing_head(model, FIRST, 0.8)
    with pytest.raises(DecodingError, match="use a chain"):
        SpeculativeDecoder(model, head, tree=TreeShape())
    expected = model.generate(IDS, do_sample=False, max_new_tokens=10)
    assert torch.equal(
        SpeculativeDecoder(model, head, 3).generate(IDS, 10, do_sample=False).sequences, expected
    )


def test_a_recurrent_target(knowing_head):
    config = AutoConfig.for_model(
        "mamba",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(DecodingError, match=r"cannot be rolled back|without a key/value cache"):
        SpeculativeDecoder(model, knowing_head(model, FIRST, 1.0))
