"""Heads of other libraries: only with the spec they were trained on."""

import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks.capture import bind
from capture_hooks.errors import HeadError
from capture_hooks.heads import HeadWarning, files, inspect_head, load_head, save_head
from capture_hooks.interop.heads import FORMATS
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
        load_head(place, target, formats=FORMATS)
    message = str(caught.value)
    assert "layer ids alone do not say which states they mean" in message
    assert "eagle_config.eagle_aux_hidden_state_layer_ids = [1, 3, 5] would mean:" in message
    assert re.search(r"post\.1, post\.3, post\.5  to .*sglang\.llama", message)


def test_by_the_library_whose_ids_it_has(raw, target):
    place, head = raw
    with pytest.warns(HeadWarning, match="taken on trust"):
        loaded = load_head(place, target, formats=FORMATS, written_for="sglang")
    assert loaded.spec == SPEC
    with pytest.raises(HeadError, match=r"its ids stand at eagle_config\.eagle_aux_hidden_state_layer_ids"):
        load_head(place, target, formats=FORMATS, written_for="vllm")
    with pytest.raises(HeadError, match=r"mean post\.1, post\.3, post\.5, and the spec given is post\.1"):
        load_head(
            place,
            target,
            formats=FORMATS,
            written_for="sglang",
            spec=CaptureSpec.parse("post.1, post.2, post.5"),
        )
    states = states_of(target)
    assert torch.equal(logits(loaded, states), logits(head, states))


@pytest.mark.parametrize("own", [True, False])
def test_inputs_move_to_the_order_wanted(target, witness_of, make_head, raw, tmp_path, own):
    place, head = raw
    written_for = None if own else "sglang"
    if own:
        place = tmp_path / "own"
        save_head(head, place, model=target, witness=witness_of(target, SPEC))
    wanted = CaptureSpec.parse("post.5, pre.2, post.3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_head(
            place, target, formats=FORMATS, written_for=None if own else "sglang", inputs=wanted
        )
    assert loaded.spec == wanted
    one, two, three = states_of(target).chunk(3, -1)
    given, moved = torch.cat([one, two, three], -1), torch.cat([three, one, two], -1)
    assert torch.allclose(logits(loaded, moved), logits(head, given), rtol=1e-5, atol=1e-5)
    other = CaptureSpec.parse("post.1, post.2, post.5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(HeadError, match="these are other states"):
            load_head(place, target, formats=FORMATS, written_for=written_for, inputs=other)


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
        loaded = load_head(place, target, formats=FORMATS, spec=SPEC)
    states = states_of(target)
    assert torch.equal(logits(loaded, states), logits(head, states))


def test_only_the_formats_given_are_read(raw, target):
    place, _ = raw
    (_, *others) = FORMATS
    for formats in ((), others):
        with pytest.raises(HeadError, match=r"no capture section: .*formats=capture_hooks\.interop\.heads"):
            load_head(place, target, formats=formats, spec=SPEC)


def test_what_does_not_fit_the_spec_or_the_target_is_refused(raw, target):
    place, _ = raw
    with pytest.raises(HeadError, match=r"fc\.weight is \[32, 96\], .* asks for \[32, 64\]"):
        load_head(place, target, formats=FORMATS, spec=CaptureSpec.parse("post.1, post.3"))
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "vocab_size": 17}))
    with pytest.raises(HeadError, match=r"vocab_size is 17, and the target's is \d+"):
        load_head(place, target, formats=FORMATS, spec=SPEC)
    (place / "config.json").write_text(json.dumps({**config, "architectures": ["Eagle3Speculator"]}))
    with pytest.raises(HeadError, match=r"architectures is \['Eagle3Speculator'\]"):
        load_head(place, target, formats=FORMATS, spec=SPEC)


def test_pickles_are_named_and_not_loaded(raw, target):
    place, _ = raw
    (place / files.WEIGHTS).rename(place / "pytorch_model.bin")
    with pytest.raises(HeadError, match=r"no model\.safetensors but pytorch_model\.bin; pickles"):
        load_head(place, target, formats=FORMATS, spec=SPEC)


def test_inspecting_it_says_what_is_missing(raw):
    place, head = raw
    described = inspect_head(place)
    assert described.spec is None
    assert described.engines == ()
    assert "no capture section" in str(described)
    vocabulary = sum(p.numel() for n, p in head.named_parameters())
    assert described.parameters == vocabulary
