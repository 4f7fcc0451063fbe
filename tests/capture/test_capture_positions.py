"""Which token of which request each row is: prompts, chunks, decoding, padding, roll-backs."""

import copy
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaForCausalLM

from capture_hooks import bind
from capture_hooks.capture import Phase
from capture_hooks.errors import CaptureError
from capture_hooks.testing import tiny

SPEC = "embed, post.2, post.5"
#: transformers 5.24 calls it ``cache`` and deprecates ``past_key_values``.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(scope="module")
def model():
    built = tiny.llama()
    built.generation_config.eos_token_id = None
    return built


def prompt(batch, length, seed=0):
    return torch.randint(3, tiny.VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def whole(model, ids):
    """States of one unpadded sequence in a single forward."""
    with torch.no_grad(), bind(model, SPEC) as capture:
        model(input_ids=ids[None], use_cache=False)
    return capture.states.packed


def same_rows(states, expected):
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@given(batch=st.integers(1, 3), length=st.integers(1, 8), new=st.integers(1, 6))
@settings(deadline=None, max_examples=10)
def test_generate_gives_one_row_per_token_but_the_last(model, batch, length, new):
    ids = prompt(batch, length)
    with torch.no_grad(), bind(model, SPEC) as capture:
        out = model.generate(ids, max_new_tokens=new, do_sample=False)
    states = capture.states
    assert len(states) == batch * (length + new - 1)
    assert states.requests == batch
    for request in range(batch):
        rows = states.sequence(request)
        assert rows.position.tolist() == list(range(length + new - 1))
        assert rows.phase.tolist() == [Phase.PREFILL] * length + [Phase.DECODE] * (new - 1)
        same_rows(rows.packed, whole(model, out[request, :-1]))


@pytest.mark.parametrize("padding", [(0, 0), (0, 5)])
@pytest.mark.parametrize("family", ["gemma3", "gemma3_text", "gemma2", "mistral"])
def test_generate_past_a_sliding_window(family, padding):
    model = tiny.model(family)  # windows of 8 tokens
    model.generation_config.eos_token_id = None
    ids = prompt(2, 12)
    mask = torch.ones_like(ids)
    mask[1, : padding[1]] = 0
    with torch.no_grad(), bind(model, SPEC) as capture:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    for request, left in enumerate(padding):
        rows = capture.states.sequence(request)
        assert rows.position.tolist() == list(range(20 - left))
        same_rows(rows.packed, whole(model, out[request, left:-1]))


@given(data=st.data(), length=st.integers(2, 12))
@settings(deadline=None, max_examples=15)
def test_chunks_of_a_prompt_join_up(model, data, length):
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1))))
    ids = prompt(2, length)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), bind(model, SPEC) as capture:
        for chunk in torch.tensor_split(ids, cuts, dim=1):
            model(input_ids=chunk, **{CACHE: cache}, use_cache=True)
    for request in range(2):
        rows = capture.states.sequence(request)
        assert rows.position.tolist() == list(range(length))
        same_rows(rows.packed, whole(model, ids[request]))


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), side=st.sampled_from(["left", "right"]))
@settings(deadline=None, max_examples=20)
def test_padding_is_dropped_and_rows_keep_their_request(model, lengths, side):
    width = max(lengths)
    ids, mask = (
        torch.zeros(len(lengths), width, dtype=torch.long),
        torch.zeros(len(lengths), width, dtype=torch.long),
    )
    for row, length in enumerate(lengths):
        at = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, at], mask[row, at] = prompt(1, length, seed=row)[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), bind(model, SPEC, target=True) as capture:
        model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    states = capture.states
    assert len(states) == len(states.target) == sum(lengths)
    for request, length in enumerate(lengths):
        rows = states.sequence(request)
        assert rows.position.tolist() == list(range(length))
        same_rows(rows.packed, whole(model, prompt(1, length, seed=request)[0]))


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_left_padded_batch_generates_without_padding_rows(model, implementation):
    ids = prompt(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    with torch.no_grad(), bind(model, SPEC) as capture:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=4, do_sample=False, cache_implementation=implementation
        )
    states = capture.states
    assert len(states) == 4 + 6 + 2 * 3
    for request, tokens in enumerate((out[0, 2:-1], out[1, :-1])):
        assert states.sequence(request).position.tolist() == list(range(len(tokens)))
        same_rows(states.sequence(request).packed, whole(model, tokens))


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(("family", "implementation"), [("gemma3", None), ("mistral", "static")])
def test_generate_past_a_window_whose_mask_has_fewer_keys_than_there_were_tokens(
    family, implementation, padding
):
    model = tiny.model(family)
    assert model.config.get_text_config().sliding_window == 8
    for length, new in ((5, 12), (20, 4)):
        ids = prompt(2, length)
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        with torch.no_grad(), bind(model, SPEC) as capture:
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                max_new_tokens=new,
                cache_implementation=implementation,
                disable_compile=True,
            )
        for request, first in enumerate((padding, 0)):
            rows = capture.states.sequence(request)
            assert rows.position.tolist() == list(range(length - first + new - 1))
            same_rows(rows.packed, whole(model, out[request, first:-1]))


def test_chunked_prefill_inside_generate(model):
    ids = prompt(1, 7)
    with torch.no_grad(), bind(model, SPEC) as capture:
        out = model.generate(ids, max_new_tokens=3, do_sample=False, prefill_chunk_size=3)
    states = capture.states
    assert states.position.tolist() == list(range(9))
    same_rows(states.packed, whole(model, out[0, :-1]))


def test_forwards_without_a_cache_are_new_requests(model):
    with torch.no_grad(), bind(model, SPEC) as capture:
        model(input_ids=prompt(2, 3), use_cache=False)
        model(input_ids=prompt(1, 4), use_cache=False)
    assert capture.states.request.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert capture.states.requests == 3


def test_interleaved_caches_keep_their_requests_apart(model):
    first, second = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ids = prompt(2, 6)
    with torch.no_grad(), bind(model, SPEC) as capture:
        for at in (slice(0, 4), slice(4, 5), slice(5, 6)):
            for row, cache in enumerate((first, second)):
                model(input_ids=ids[row : row + 1, at], **{CACHE: cache}, use_cache=True)
    for request in range(2):
        rows = capture.states.sequence(request)
        assert rows.position.tolist() == list(range(6))
        same_rows(rows.packed, whole(model, ids[request]))


def test_a_cache_made_by_the_model_is_followed(model):
    ids = prompt(1, 5)
    with torch.no_grad(), bind(model, SPEC) as capture:
        output = model(input_ids=ids[:, :3], use_cache=True)
        model(input_ids=ids[:, 3:], **{CACHE: output[CACHE]})
    assert capture.states.request.tolist() == [0] * 5
    assert capture.states.position.tolist() == list(range(5))


def test_rejected_tokens_are_replaced_by_those_run_after_the_roll_back(model):
    ids = prompt(1, 8)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), bind(model, SPEC) as capture:
        model(input_ids=ids[:, :4], **{CACHE: cache})
        model(input_ids=prompt(1, 3, seed=9), **{CACHE: cache})  # drafts, of which none is kept
        assert len(capture.states) == 7
        cache.crop(-3)
        model(input_ids=ids[:, 4:], **{CACHE: cache})
    states = capture.states
    assert states.position.tolist() == list(range(8))
    same_rows(states.packed, whole(model, ids[0]))


def test_prompt_lookup_decoding_ends_with_one_row_per_token(model):
    ids = prompt(1, 4).repeat(1, 3)
    with torch.no_grad(), bind(model, SPEC) as capture:
        out = model.generate(ids, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
    states = capture.states
    length = len(states)
    assert length >= out.shape[1] - 1  # the last round may have run drafts past the end
    assert states.position.tolist() == list(range(length))
    same_rows(states.packed[: out.shape[1] - 1], whole(model, out[0, :-1]))


def test_a_prefix_from_before_the_session_counts(model):
    ids = prompt(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :4], attention_mask=mask[:, :4], **{CACHE: cache})
        with bind(model, SPEC) as capture:
            model(input_ids=ids[:, 4:], attention_mask=mask, **{CACHE: cache})
    assert capture.states.sequence(0).position.tolist() == [2, 3]
    assert capture.states.sequence(1).position.tolist() == [4, 5]


def test_tokens_the_session_did_not_see_are_an_error(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), bind(model, SPEC) as capture:
        model(input_ids=prompt(1, 3), **{CACHE: cache})
        capture._detach()
        model(input_ids=prompt(1, 2), **{CACHE: cache})
        capture._attach()
        with pytest.raises(CaptureError, match="holds 5 tokens but this session saw 3"):
            model(input_ids=prompt(1, 1), **{CACHE: cache})


def test_beam_search_is_refused(model):
    refused = pytest.raises(CaptureError, match="beam search reorders the KV cache")
    with torch.no_grad(), bind(model, SPEC), refused:
        model.generate(prompt(1, 4), max_new_tokens=4, num_beams=2, do_sample=False)
    model.generate(prompt(1, 4), max_new_tokens=4, num_beams=2, do_sample=False)


def test_a_followed_cache_can_be_reordered_again_afterwards_and_so_can_its_copies(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), bind(model, SPEC), bind(model, "post.1"):
        model(input_ids=prompt(2, 3), **{CACHE: cache})
        copied = copy.deepcopy(cache)
        with pytest.raises(CaptureError, match="num_beams=1"):
            cache.reorder_cache(torch.tensor([1, 0]))
        copied.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(copied.layers[0].keys[0], cache.layers[0].keys[1])
    assert "reorder_cache" not in vars(cache)
    cache.reorder_cache(torch.tensor([1, 0]))


def test_a_batch_that_changes_size_on_one_cache_is_refused(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), bind(model, SPEC):
        model(input_ids=prompt(1, 3), **{CACHE: cache})
        cache.batch_repeat_interleave(3)
        with pytest.raises(CaptureError, match="3 sequences continues a cache of 1"):
            model(input_ids=prompt(3, 1), **{CACHE: cache})


def test_a_cleared_session_counts_from_zero(model):
    with torch.no_grad(), bind(model, SPEC) as capture:
        model(prompt(2, 3))
        first = capture.states
        capture.clear()
        with pytest.raises(CaptureError, match="nothing was captured"):
            _ = capture.states
        model(prompt(1, 3))
        assert capture.states.request.tolist() == [0, 0, 0]
    assert len(first) == 6  # what was handed out stays


def test_reading_between_forwards_changes_nothing(model):
    ids = prompt(2, 5)
    with torch.no_grad(), bind(model, SPEC) as often, bind(model, SPEC) as once:
        cache = DynamicCache(config=model.config)
        for at in range(5):
            model(input_ids=ids[:, at : at + 1], **{CACHE: cache})
            assert len(often.states) == 2 * (at + 1)
    for name in ("packed", "request", "position", "phase"):
        assert torch.equal(getattr(often.states, name), getattr(once.states, name))


class CountSyncs(TorchDispatchMode):
    """Counts the operators that make an accelerator's host wait for a value."""

    NAMES = ("aten::nonzero", "aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in self.NAMES
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masked", [False, True])
def test_a_forward_waits_for_the_device_at_most_once(model, masked):
    ids = prompt(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    kwargs = {"attention_mask": mask} if masked else {}

    def count(out=None):
        with torch.no_grad(), bind(model, SPEC, out=out), CountSyncs() as counter:
            model(input_ids=ids, use_cache=False, **kwargs)
        return counter.count

    with torch.no_grad(), CountSyncs() as plain:
        model(input_ids=ids, use_cache=False, **kwargs)
    assert count() - plain.count == int(masked)
    assert count(out=torch.empty(16, 3 * tiny.HIDDEN)) == plain.count


def test_a_static_buffer_is_written_in_place_and_read_without_padding(model):
    ids = prompt(2, 4)
    mask = torch.ones_like(ids)
    mask[1, 3] = 0
    out, target = torch.zeros(20, 3 * tiny.HIDDEN), torch.zeros(20, tiny.HIDDEN)
    with torch.no_grad(), bind(model, SPEC, target=True, out=out, target_out=target) as capture:
        model(input_ids=ids, use_cache=False)
        model(input_ids=ids, use_cache=False)
        states = capture.states
        assert states.packed.data_ptr() == out.data_ptr()
        assert len(states) == 16
        assert torch.equal(out[:8], out[8:16])
        assert torch.equal(states.target, target[:16])
        with pytest.raises(
            CaptureError, match="out has 20 rows, 16 of them filled, and this forward gives 8 more"
        ):
            model(input_ids=ids, use_cache=False)
        capture.clear()
        model(input_ids=ids, attention_mask=mask, use_cache=False)
        assert len(capture.states) == 7
        assert capture.states.position.tolist() == [0, 1, 2, 3, 0, 1, 2]
        assert torch.equal(capture.states.packed, out[:7])
