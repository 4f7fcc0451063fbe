"""Heads of other libraries: only with the spec they were trained on."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks.capture import bind
from capture_hooks.errors import HeadError
from capture_hooks.heads import HeadWarning, files, inspect_head, load_head, save_head
from capture_hooks.spec import CaptureSpec

SPEC = CaptureSpec.parse("post.1, post.3, post.5")


@pytest.fixture
def raw(target, witness_of, make_head, tmp_path):
    """A head as another library writes it, and what it computes."""
    head = make_head(target, SPEC)
    save_head(head, tmp_path / "head", model=target, witness=witness_of(target, SPEC))
    place = tmp_path / "head"
    (place / files.WITNESS).unlink()
    (place / "capture").rmdir()
    config = json.loads((place / "config.json").read_text())
    for name in (
        "capture",
        "rope_parameters",
        "num_aux_hidden_states",
        "target_hidden_size",
        "eagle3_training",
    ):
        config.pop(name)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "head_dim"):
        config.pop(name)
    config.pop("eagle_aux_hidden_state_layer_ids")
    (place / "config.json").write_text(json.dumps(config))
    return place, head


def logits(head, states):
    cache = head.new_cache(32)
    with torch.no_grad():
        return head.logits(head.extend(cache, states, torch.arange(len(states)), 0))


def states_of(model):
    with bind(model, SPEC) as capture, torch.no_grad():
        model(torch.arange(12).unsqueeze(0), use_cache=False)
    return capture.states.packed


def test_without_a_spec_it_shows_what_the_ids_could_mean(raw, target):
    place, _ = raw
    with pytest.raises(HeadError) as caught:
        load_head(place, target)
    message = str(caught.value)
    assert "layer ids alone do not say which hidden states they mean; pass the spec" in message
    assert "eagle_config.eagle_aux_hidden_state_layer_ids = [1, 3, 5] would mean:" in message
    assert "to sglang 0.5.23: post.1, post.3, post.5" in message
    assert "to vllm 0.33.0: pre.1, pre.3, pre.5" in message
    assert (
        "it has no eagle_aux_hidden_state_layer_ids: a reader of that key takes its own default layers, "
        "usually post.1, post.3, post.4" in message
    )


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_with_a_spec_it_computes_the_same(raw, target, layer, prefix):
    place, head = raw
    tensors = load_file(place / files.WEIGHTS)
    renamed = {prefix + name.replace("midlayer.", layer): tensor for name, tensor in tensors.items()}
    save_file(renamed, place / files.WEIGHTS)
    with pytest.warns(
        HeadWarning, match=r"carries no witness: that it eats post\.1, post\.3, post\.5 is taken on"
    ):
        loaded = load_head(place, target, spec=SPEC)
    states = states_of(target)
    assert torch.equal(logits(loaded, states), logits(head, states))


def test_what_does_not_fit_the_spec_or_the_target_is_refused(raw, target):
    place, _ = raw
    with pytest.raises(HeadError, match=r"fc\.weight has shape \[32, 96\]; .* ask for \[32, 64\]"):
        load_head(place, target, spec=CaptureSpec.parse("post.1, post.3"))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "vocab_size": 17}))
    with pytest.raises(HeadError, match=r"vocab_size is 17, and the target and the spec given ask for \d+"):
        load_head(place, target, spec=SPEC)
    (place / "config.json").write_text(json.dumps({**config, "architectures": ["Eagle3Speculator"]}))
    with pytest.raises(HeadError, match=r"architectures is \['Eagle3Speculator'\]"):
        load_head(place, target, spec=SPEC)


def test_pickles_are_named_and_not_loaded(raw, target):
    place, _ = raw
    (place / files.WEIGHTS).rename(place / "pytorch_model.bin")
    with pytest.raises(HeadError, match=r"no model\.safetensors but pytorch_model\.bin; convert"):
        load_head(place, target, spec=SPEC)


def test_inspecting_it_says_what_is_missing(raw):
    place, head = raw
    described = inspect_head(place)
    assert described.spec is None
    assert described.engines == ()
    assert "no capture section" in str(described)
    vocabulary = sum(p.numel() for n, p in head.named_parameters())
    assert described.parameters == vocabulary
