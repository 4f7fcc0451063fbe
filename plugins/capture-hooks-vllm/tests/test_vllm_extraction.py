"""From points to the ids that vLLM is asked for, and from its columns back: any spec, in any order."""

import pytest
import torch
from capture_hooks_vllm.extraction import extraction
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from capture_hooks.capture import find_anatomy
from capture_hooks.errors import EngineError
from capture_hooks.spec import CaptureSpec, Point
from capture_hooks.testing import tiny

LAYERS, HIDDEN, TOKENS = 6, 4, 3
ANATOMY = find_anatomy(tiny.llama(num_hidden_layers=LAYERS))
POINTS = [
    Point("embed"),
    Point("final_norm"),
    *(Point.pre(k) for k in range(LAYERS)),
    *(Point.post(k) for k in range(LAYERS)),
]


class Marked(nn.Module):
    """Stands where the final norm does: what it has seen is told apart from the rest."""

    def forward(self, states):
        return states + 100


def shown(point):
    """The number that the columns of a point hold here: its boundary, 100 more where normed."""
    site = point.resolve(LAYERS)
    return LAYERS + 100 if site.norm else site.boundary


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(POINTS), min_size=1, max_size=5, unique_by=shown),
    st.sampled_from(POINTS),
)
def test_every_column_is_its_points_whatever_the_order(inputs, target):
    plan = extraction(ANATOMY, CaptureSpec(tuple(inputs), target), "llama", "0.32.0")
    assert list(plan.ids) == sorted(set(plan.ids))
    states = torch.tensor(plan.ids).float()[None, :, None].expand(TOKENS, -1, HIDDEN)
    packed, end = plan.split(states, Marked() if plan.normed else None)
    wanted = torch.tensor([float(shown(point)) for point in inputs]).repeat_interleave(HIDDEN)
    assert torch.equal(packed, wanted.expand(TOKENS, -1))
    assert torch.equal(end, torch.full((TOKENS, HIDDEN), float(shown(target))))


@pytest.mark.parametrize(
    ("text", "model_type", "said"),
    [
        ("post.1, out:model.norm", "llama", "out:model.norm is a submodule's value"),
        ("embed, post.1", "deepseek_v3", "id 0 adds the embedding to a residual that is None"),
        ("post.1", "deepseek_v4", "several residual streams"),
    ],
)
def test_what_vllm_cannot_extract_is_refused_by_name(text, model_type, said):
    with pytest.raises(EngineError, match=said):
        extraction(ANATOMY, CaptureSpec.parse(text), model_type, "0.32.0")


def test_a_version_whose_ids_nobody_established():
    with pytest.raises(EngineError, match=r"0\.99\.0 was not established"):
        extraction(ANATOMY, CaptureSpec.parse("post.1"), "llama", "0.99.0")
