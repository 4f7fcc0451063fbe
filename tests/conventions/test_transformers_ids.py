"""The convention of transformers against transformers itself, on models captured by hooks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks import CaptureSpec, bind
from capture_hooks.conventions import Convention, convention_for
from capture_hooks.errors import ConventionError
from capture_hooks.testing import tiny

MODELS = {family: tiny.model(family) for family in ("llama", "gpt2", "gemma2", "mamba")}
END_IS_THERE = ("mamba",)
TOKENS = torch.tensor([[5, 3, 8, 1, 7]])


def of(family: str) -> Convention:
    return convention_for("transformers", MODELS[family].config.model_type)


@pytest.mark.parametrize("family", sorted(MODELS))
@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_hidden_states_k_is_the_point(family: str, data: st.DataObject) -> None:
    model = MODELS[family]
    n = tiny.LAYERS
    ids = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=4, unique=True))
    spec = CaptureSpec(of(family).to_points(ids, n))
    with torch.no_grad(), bind(model, spec) as capture:
        hidden = model(TOKENS, use_cache=False, output_hidden_states=True).hidden_states
    assert len(hidden) == n + 1
    assert torch.equal(capture.states.packed, torch.cat([hidden[k][0] for k in ids], dim=-1))
    assert of(family).from_points(spec.inputs, n) == ids


@pytest.mark.parametrize("family", sorted(set(MODELS) - {*END_IS_THERE}))
def test_the_end_of_the_stream_is_not_in_the_tuple(family: str) -> None:
    model = MODELS[family]
    last = CaptureSpec.parse("post.-1")
    with torch.no_grad(), bind(model, last) as capture:
        hidden = model(TOKENS, use_cache=False, output_hidden_states=True).hidden_states
    assert not any(torch.equal(capture.states.packed, state[0]) for state in hidden)
    with pytest.raises(ConventionError, match=r"post\.-1 is boundary 6, which is not in the tuple"):
        of(family).from_points(last.inputs, tiny.LAYERS)
