"""Models whose RoPE looks at the longest position of a forward: each row is as if its sequence were alone."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks import CaptureSpec
from capture_hooks.capture import LengthRule, find_anatomy
from capture_hooks.errors import DataError
from capture_hooks.store import Dump, Example, Examples, ModelStates, write_dump
from capture_hooks.store.model import plan_batches
from capture_hooks.testing import tiny
from capture_hooks.training.online import LiveCapture, grouped

SPEC = CaptureSpec.parse("embed, post.0")
LIMIT = 24  # the longest sequence that these models compute with the original frequencies
LONGROPE = tiny.model("llama_longrope").config.rope_parameters
MODELS = {
    "llama_longrope": tiny.model("llama_longrope"),
    "phi3_longrope": tiny.model("phi3_longrope"),
    "llama_dynamic": tiny.model("llama_dynamic"),
    # RoPE by type of layer
    "gemma3_text": tiny.model(
        "gemma3_text",
        rope_parameters={
            "full_attention": dict(LONGROPE),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}
FRESH = copy.deepcopy(MODELS)


def alone(name, ids):
    """Embedding, first layer's output and final state of one sequence, in a model that never saw another."""
    with torch.no_grad():
        read = copy.deepcopy(FRESH[name])(ids[None], use_cache=False, output_hidden_states=True)
    hidden = [state[0] for state in read.hidden_states]
    return torch.cat(hidden[:2], -1), hidden[-1]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), max_size=6), seed=st.integers(0, 99))
def test_a_row_dumped_or_captured_live_is_the_row_of_its_sequence_alone(
    tmp_path_factory, name, lengths, seed
):
    draw = torch.Generator().manual_seed(seed)
    lengths = [LIMIT, LIMIT + 1, *lengths]
    tokens = [torch.randint(3, 250, (length,), generator=draw) for length in lengths]
    examples = Examples("made", tuple(Example(ids, torch.ones(len(ids)).bool(), "made") for ids in tokens))
    directory = tmp_path_factory.mktemp("dump") / "d"
    write_dump(ModelStates(MODELS[name], SPEC, examples), directory)
    live = LiveCapture(MODELS[name], SPEC, find_anatomy(MODELS[name]))(
        {
            "token_ids": torch.cat(tokens),
            "loss_mask": torch.ones(sum(lengths)).bool(),
            "starts": torch.tensor([0, *lengths]).cumsum(0),
            "context": torch.zeros(0, dtype=torch.long),
            "context_length": torch.zeros(len(lengths), dtype=torch.long),
            "media": [None] * len(lengths),
        }
    )
    rows = zip(live["states"].split(lengths), live["target"].split(lengths), strict=True)
    for stored, (states, target), ids in zip(Dump.open(directory), rows, tokens, strict=True):
        expected, final = alone(name, ids)
        close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
        torch.testing.assert_close(stored.states, expected, **close)
        torch.testing.assert_close(states, expected, **close)
        torch.testing.assert_close(stored.target, final, **close)
        torch.testing.assert_close(target, final, **close)


def test_the_states_would_differ_by_much():
    """What the test above would see if a batch went by its longest row."""
    short, long = torch.arange(3, 3 + LIMIT), torch.arange(3, 4 + LIMIT)
    for name in MODELS:
        ours, other = alone(name, short)[1], alone(name, long)[1][:LIMIT]
        assert (ours - other).abs().max() > 0.01 * ours.abs().max(), name


RULES = st.builds(
    LengthRule,
    switches=st.frozensets(st.integers(1, 40), max_size=3),
    separate=st.none() | st.integers(1, 40),
)


@given(RULES, st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_only_lengths_that_are_computed_alike_share_a_forward(rule, lengths):
    def computation(length):
        """All that the rule lets matter."""
        return frozenset(end for end in rule.switches if length > end)

    for groups in (grouped(lengths, rule), plan_batches(lengths, range(len(lengths)), 400, rule.alike)):
        assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
        for group in groups:
            assert len({computation(lengths[i]) for i in group}) == 1
            longest = max(lengths[i] for i in group)
            assert len(group) == 1 or rule.separate is None or longest <= rule.separate


@given(RULES, st.integers(0, 60), st.integers(1, 20))
def test_as_many_rows_may_follow_as_single_ones_would_be_computed_alike(rule, past, rows):
    most = rule.most_rows(past)
    fits = most is None or rows <= most
    assert fits == (rows == 1 or rule.alike(past + 1, past + rows))


def test_a_dynamic_rope_is_read_up_to_its_stretched_context(tmp_path):
    model = MODELS["llama_dynamic"]
    longest = int(LIMIT * model.config.rope_parameters["factor"])
    for length, fits in ((longest, True), (longest + 1, False)):
        example = Example(torch.full((length,), 5), torch.ones(length).bool(), "here")
        if fits:
            write_dump(ModelStates(model, SPEC, Examples("made", (example,))), tmp_path / "d")
            continue
        with pytest.raises(DataError, match=f"the model's context ends at {longest}"):
            write_dump(ModelStates(model, SPEC, Examples("made", (example,))), tmp_path / "e")
