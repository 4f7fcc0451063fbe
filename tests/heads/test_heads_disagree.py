"""Whatever contradicts something else in a head's directory, or its target, is one clear line."""

import copy
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks.errors import HeadError, SpecError
from capture_hooks.heads import HeadWarning, files, inspect_head, load_head, save_head
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

SPEC = CaptureSpec.parse("post.5, post.1, post.3")


@pytest.fixture(scope="module")
def original(target, witness_of, make_head, tmp_path_factory):
    place = tmp_path_factory.mktemp("original") / "head"
    save_head(make_head(target, SPEC, fc_norm=True), place, model=target, witness=witness_of(target, SPEC))
    return place


@pytest.fixture
def place(original, tmp_path):
    return shutil.copytree(original, tmp_path / "head")


def edit(place, change):
    path = place / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_weights(place, change):
    """Change the weights, and the digest with them."""
    tensors = load_file(place / files.WEIGHTS)
    change(tensors)
    save_file(tensors, place / files.WEIGHTS)
    edit(place, lambda c: c["capture"].update(weights_sha256=files.digest(place / files.WEIGHTS)))


def refused(place, model, message, **options):
    with pytest.raises(HeadError, match=message) as caught:
        load_head(place, model, **options)
    assert "\n" not in str(caught.value)
    assert str(place) in str(caught.value)


def nested(config):
    return config["eagle_config"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: nested(c).update(eagle_aux_hidden_state_layer_ids=[2, 4, 6]),
            r"eagle_config\.eagle_aux_hidden_state_layer_ids is \[2, 4, 6\] \(post\.2, post\.4, post\.6\), "
            r"and the capture section says \[1, 3, 5\] \(post\.1, post\.3, post\.5\)",
        ),
        (
            lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 5]),
            r"eagle_aux_hidden_state_layer_ids is \[1, 3, 5\] \(pre\.1, pre\.3, pre\.5\), "
            r"and the capture section says \[2, 4, 6\] \(post\.1, post\.3, post\.5\)",
        ),
        (lambda c: c.pop("eagle_config"), r"layer_ids is None, and the capture section says \[1, 3, 5\]"),
        (
            lambda c: c["capture"]["spec"].update(inputs=["post.5", "post.1", "post.2"]),
            r"order \[1, 2, 0\] puts the inputs in the order post\.1, post\.2, post\.5, .* says post\.1",
        ),
        (
            lambda c: c["capture"].update(order=[0, 1, 2], file_inputs=["post.5", "post.1", "post.3"]),
            r"capture\.order is \[0, 1, 2\], and ascending .* is \[1, 2, 0\]",
        ),
        (
            lambda c: c["capture"].update(order=[0, 0, 2]),
            r"order \[0, 0, 2\] is no permutation of the 3 inputs",
        ),
        (lambda c: c["capture"].update(format=2), r"has format 2, and this version reads 1; update"),
        (lambda c: c["capture"].update(surprise=1), r"capture\.surprise: Extra inputs are not permitted"),
        (lambda c: c["capture"].pop("target"), r"capture\.target: Field required"),
        (lambda c: c.update(capture="yes"), r"capture is 'yes'; it must be an object"),
        (
            lambda c: c["capture"]["spec"].update(inputs=["post.x"]),
            r"capture\.spec: .*is not a capture point",
        ),
        (
            lambda c: c.update(num_aux_hidden_states=4),
            r"num_aux_hidden_states is 4, and capture.spec has 3 inputs",
        ),
        (lambda c: c.update(vocab_size=9), r"vocab_size is 9, and capture.target.vocab_size says \d+"),
        (lambda c: c.update(target_hidden_size=9), r"target_hidden_size is 9, and capture\.target"),
        (lambda c: c.update(tie_word_embeddings=True), r"tie_word_embeddings is True; it must be false"),
        (lambda c: c.pop("tie_word_embeddings"), r"tie_word_embeddings is None; it must be false"),
        (
            lambda c: c.update(draft_vocab_size=41),
            r"lm_head\.weight has shape \[40, 32\]; .* ask for \[41, 32\]",
        ),
        (lambda c: c.update(hidden_size=33), r"fc\.weight has shape \[32, 96\]; .* ask for \[33, 96\]"),
        (
            lambda c: c.update(draft_vocab_size="many"),
            r"draft_vocab_size is 'many'; a whole number is needed",
        ),
    ],
)
def test_config_against_itself(place, target, change, message):
    edit(place, change)
    refused(place, target, message)
    with pytest.raises(HeadError, match=message):
        inspect_head(place)
    if "layer_ids" in message:
        assert inspect_head(place, ids=False).section is not None  # for a reader that needs none
        return
    with pytest.raises(HeadError, match=message):
        inspect_head(place, ids=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["d2t"].add_(1000), r"d2t gives target ids .*, outside a vocabulary of"),
        (lambda t: t["d2t"].__setitem__(0, 250), r"d2t does not give ascending target ids"),
        (lambda t: t["t2d"].logical_not_(), r"t2d marks \d+ ids .* and d2t names 40 ids"),
        (lambda t: t.pop("d2t"), r"no d2t, and draft_vocab_size 40 differs from vocab_size"),
        (lambda t: t["norm.weight"].fill_(torch.nan), r"norm\.weight holds 32 NaN or infinite values of 32"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].clone()}),
            r"fc\.weight has shape \[32, 64\]",
        ),
    ],
)
def test_weights_against_the_config(place, target, change, message):
    edit_weights(place, change)
    refused(place, target, message)


@pytest.mark.parametrize("name", ["midlayer.mlp.up_proj.weight", "fc_norm.1.weight", "norm.weight"])
def test_a_missing_or_misshapen_weight_is_named(place, target, name):
    edit_weights(place, lambda t: t.pop(name))
    with pytest.raises(HeadError, match=name.replace(".", r"\.")):
        load_head(place, target)
    edit_weights(place, lambda t: t.update({name: torch.ones(3)}))
    with pytest.raises(HeadError, match=name.replace(".", r"\.")):
        load_head(place, target)


@pytest.mark.parametrize("name", [files.WEIGHTS, files.WITNESS])
def test_changed_truncated_and_missing_files(place, target, name):
    path = place / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    refused(
        place,
        target,
        r"was changed after the head was saved: its SHA-256 is \w{16}\.\.\., and .* \w{16}\.\.\.",
    )
    path.write_bytes(whole[: len(whole) // 2])
    refused(place, target, "is damaged, truncated or no safetensors file")
    path.unlink()
    refused(place, target, "is missing: the head was copied or written in part")


def test_a_witness_of_another_spec(place, original, target, witness_of, make_head, tmp_path):
    other = CaptureSpec.parse("post.5, post.1, post.2")
    witness_of(target, other).save(place / files.WITNESS)
    digest = files.digest(place / files.WITNESS)
    edit(place, lambda c: c["capture"]["witness"].update(sha256=digest))
    refused(
        place,
        target,
        r"holds the states post\.5, post\.1, post\.2, and capture\.spec is post\.5, post\.1, post\.3",
    )


def test_another_size_or_vocabulary(place):
    refused(
        place,
        tiny.llama(num_hidden_layers=7),
        "a model with n_layers = 8, and the one given has n_layers = 7",
    )
    wide = tiny.llama(num_hidden_layers=8, hidden_size=64)
    refused(place, wide, "hidden_size = 32, and the one given has hidden_size = 64")
    small = tiny.llama(num_hidden_layers=8, vocab_size=200)
    refused(place, small, r"vocab_size = \d+, and the one given has vocab_size = 200")


@pytest.mark.parametrize("check_witness", [True, False])
def test_other_weights(place, target, check_witness):
    other = tiny.llama(num_hidden_layers=8, seed=3)
    refused(place, other, r"another target .*weights \w{12} here, \w{12} there", check_witness=check_witness)
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        tuned.model.layers[3].mlp.up_proj.weight.mul_(1.3)
    refused(place, tuned, r"another target .*weights \w{12} here, \w{12} there", check_witness=check_witness)


def test_the_same_weights_computing_something_else(place, target):
    """What no fingerprint of weights sees: another RoPE base."""
    other = tiny.llama(num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 3.0})
    other.load_state_dict(target.state_dict())
    refused(place, other, r"does not have the states .*mismatch: .*post\.5 .*; its weights are the same")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_target_is_taken_with_a_warning_that_states_the_size(place, target, dtype):
    with pytest.warns(
        HeadWarning, match=r"states differ a little .*drift: .*post\.5 0\.0\d+ .*cast"
    ) as caught:
        head = load_head(place, copy.deepcopy(target).to(dtype))
    assert caught[0].filename == __file__
    assert head.spec == SPEC
    with pytest.warns(HeadWarning, match=r"cast.* sampled weights are [\d.e-]+ apart, relative"):
        load_head(place, copy.deepcopy(target).to(dtype), check_witness=False)


class Rounded(torch.nn.Module):
    """A linear layer kept in 8 bits, as quantising libraries keep it."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        weight = (linear.weight / scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight * self.scale)


def rounded(model):
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for part, name in ((layer.mlp, "down_proj"), (layer.mlp, "up_proj"), (layer.self_attn, "o_proj")):
            setattr(part, name, Rounded(getattr(part, name)))
    return model


def test_a_quantised_target_is_judged_by_its_states(place, target):
    with pytest.warns(
        HeadWarning, match=r"states differ a little .*drift: .*post\.5 0\.0\d+ .*parameters differ"
    ):
        load_head(place, rounded(target))
    other = rounded(tiny.llama(num_hidden_layers=8, seed=3))
    refused(place, other, r"does not have the states .*mismatch.*parameters differ")
    refused(place, rounded(target), r"cannot be told without its witness .*parameters", check_witness=False)


def test_the_own_target_gives_no_warning(place, target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_head(place, target)
        load_head(place, target, spec=CaptureSpec.parse("pre.6, post.-7, pre.4"))


def test_the_spec_asked_for(place, target):
    with pytest.raises(
        HeadError,
        match=r"asked for is post\.1, post\.3, post\.5, and the head was trained on post\.5, post\.1",
    ):
        load_head(place, target, spec=CaptureSpec.parse("post.1, post.3, post.5"))
    with pytest.raises(SpecError, match=r"post\.9 is outside a model of 8 layers"):
        load_head(place, target, spec=CaptureSpec.parse("post.9"))


def test_saving_refuses_what_does_not_belong_together(target, witness_of, make_head, tmp_path):
    head, witness = make_head(target, SPEC), witness_of(target, SPEC)
    with pytest.raises(HeadError, match=r"made for a target of 8 layers, and the target given has 7"):
        save_head(head, tmp_path / "a", model=tiny.llama(num_hidden_layers=7), witness=witness)
    other = witness_of(target, CaptureSpec.parse("post.1, post.3, post.5"))
    with pytest.raises(
        HeadError, match=r"witness holds the states post\.1, post\.3, post\.5, and the head eats"
    ):
        save_head(head, tmp_path / "a", model=target, witness=other)
    with torch.no_grad():
        head.fc.weight[0, 0] = torch.nan
    with pytest.raises(HeadError, match=r"the head eagle3: fc\.weight holds 1 NaN"):
        save_head(head, tmp_path / "a", model=target, witness=witness)
    assert not list(tmp_path.iterdir())
