"""A target whose states depend on later tokens is refused, for a dump and while training."""

import pytest
import torch

from capture_hooks.errors import ModelError
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Example, Examples, ModelStates
from capture_hooks.testing import tiny
from capture_hooks.training import TrainConfig
from capture_hooks.training.build import prepare

SPEC = "post.0, post.1, post.3"
#: Attention both ways by a setting, and prefixes that see themselves.
BOTH_WAYS = [("gemma3_text", {"use_bidirectional_attention": True}), ("llama", {"is_causal": False})]


def data():
    ids = torch.randint(3, 250, (3, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(24) >= 12
    return Examples("made", tuple(Example(row, mask, f"made:{at}") for at, row in enumerate(ids)))


@pytest.mark.parametrize(("family", "settings"), BOTH_WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_both_ways_is_refused(family, settings, dtype):
    model = tiny.model(family, **settings).to(dtype)
    with pytest.raises(ModelError, match="reads tokens before they are written: the state at position"):
        ModelStates(model, CaptureSpec.parse(SPEC), data())
    with pytest.raises(ModelError, match="needs a target that only looks back"):
        prepare(model, data(), TrainConfig(spec=SPEC, steps=1, held_out=0.0))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss", "gemma3"])
def test_what_looks_back_is_not(family):
    """In bfloat16, and where experts see other batches."""
    model = tiny.model(family).bfloat16()
    ModelStates(model, CaptureSpec.parse(SPEC), data())
    prepare(model, data(), TrainConfig(spec=SPEC, steps=1, held_out=0.0))
