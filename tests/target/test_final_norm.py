"""A target's final norm read from its checkpoint alone: what the whole model would compute."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from capture_hooks.capture import find_anatomy
from capture_hooks.errors import ModelError
from capture_hooks.target import checkpoint, final_norm_of
from capture_hooks.testing import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "qwen3", "gpt2"])
def test_it_computes_what_the_models_own_does(tmp_path, monkeypatch, family, dtype):
    tiny.model(family).save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    anatomy = find_anatomy(whole)
    states = torch.randn(5, anatomy.hidden_size, generator=torch.manual_seed(0)).to(dtype)
    found = final_norm_of(str(tmp_path), dtype)
    with torch.no_grad():
        assert torch.equal(found(states), anatomy.final_norm(states))
        # Where the checkpoint's tensors are not found by name the model is loaded instead.
        monkeypatch.setattr(checkpoint, "mapped_tensors", lambda model: {})
        assert torch.equal(final_norm_of(str(tmp_path), dtype)(states), anatomy.final_norm(states))


def test_no_such_model(tmp_path):
    with pytest.raises(ModelError, match="cannot load the model"):
        final_norm_of(str(tmp_path / "nowhere"), torch.float32)
