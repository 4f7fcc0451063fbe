"""Weights are what modules compute: through adapters, parametrizations, hooks and quantised weights."""

import copy

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from capture_hooks.capture import find_anatomy
from capture_hooks.capture.fingerprint import TargetFingerprint
from capture_hooks.capture.weights import gain, projection, table
from capture_hooks.errors import BindError, HeadError
from capture_hooks.heads import readout_of
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

IDS = torch.randint(3, 260, (2, 12), generator=torch.manual_seed(0))
SPEC = CaptureSpec.parse("embed, post.0")

#: Adapters on the output projection.
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=3),
    "dora": lambda: peft.LoraConfig(target_modules=["lm_head"], r=3, use_dora=True),
    "rslora with a bias": lambda: peft.LoraConfig(
        target_modules=["lm_head"], r=3, use_rslora=True, lora_alpha=5
    ),
    "ia3": lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
    "ia3 on the input": lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"]),
    "loha": lambda: peft.LoHaConfig(target_modules=["lm_head"], r=2),
    "lokr": lambda: peft.LoKrConfig(target_modules=["lm_head"], r=2),
    "oft": lambda: peft.OFTConfig(target_modules=["lm_head"], r=0, oft_block_size=8),
    "vera": lambda: peft.VeraConfig(target_modules=["lm_head"], r=2),
    "fourier": lambda: peft.FourierFTConfig(target_modules=["lm_head"], n_frequency=40),
    "saved whole": lambda: peft.LoraConfig(target_modules=["q_proj"], r=2, modules_to_save=["lm_head"]),
    "some tokens": lambda: peft.TrainableTokensConfig(
        target_modules=["embed_tokens"], token_indices=IDS[0, :3].tolist()
    ),
    "embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens"], r=2),
    "embedding and output": lambda: peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], r=2),
    "norm saved whole": lambda: peft.LoraConfig(
        target_modules=["q_proj"], r=2, modules_to_save=["norm", "input_layernorm"]
    ),
}
STATES = ("active", "merged", "disabled", "merged and disabled", "second", "both")


def trained(config, *, tied=False, dtype=torch.float32):
    """A model whose adapter changes it as training would."""
    model = tiny.llama(tie_word_embeddings=tied).to(dtype)
    wrapped = peft.get_peft_model(model, config())
    shake(wrapped)
    return wrapped.eval()


def shake(wrapped):
    numbers = torch.manual_seed(1)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=numbers).to(parameter) / 4)


def put(wrapped, config, state):
    """Bring the model into one of STATES."""
    if state in ("second", "both"):
        wrapped.add_adapter("other", config())
        wrapped.set_adapter("other")
        shake(wrapped)
    if state == "both":
        wrapped.base_model.set_adapter(["default", "other"])
    if "merged" in state:
        wrapped.merge_adapter()
    if "disabled" in state:
        wrapped.base_model.disable_adapter_layers()
    return wrapped.eval()


def check(model, tolerance=1e-5):
    """Teaching logits from the readout are the model's own, and heads start with its rows and gains."""
    anatomy = find_anatomy(model)
    seen = []
    hook = anatomy.lm_head.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    with torch.no_grad():
        logits = model(IDS).logits
        embedded = anatomy.embedding(IDS)
    hook.remove()
    readout = readout_of(anatomy, SPEC)
    ours = readout.logits(seen[0].flatten(0, 1)).view_as(logits)
    size = logits.abs().max().float()
    assert (ours.float() - logits.float()).abs().max() <= tolerance * size
    head = (
        registry()
        .heads["eagle3"]
        .create(
            registry().heads["eagle3"].config_type(), SPEC, anatomy, readout, torch.arange(anatomy.vocab_size)
        )
    )
    difference = (head.embedding[IDS].float() - embedded.float()).abs().max()
    assert difference <= tolerance * embedded.abs().max().float()
    return logits


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_head_is_taught_the_adapted_models_logits(kind, state):
    config = ADAPTERS[kind]
    if state == "both" and kind in ("some tokens", "saved whole", "norm saved whole"):
        pytest.skip("PEFT activates one of these at a time")
    wrapped = put(trained(config), config, state)
    logits = check(wrapped)
    plain = tiny.llama()(IDS).logits
    assert torch.allclose(logits, plain, atol=1e-4) is ("disabled" in state)
    # The fingerprint is that of the model which PEFT's own merge gives.
    print_ = TargetFingerprint.of(find_anatomy(wrapped))
    base = TargetFingerprint.of(find_anatomy(tiny.llama()))
    if state == "disabled":
        assert print_ == base
    elif "disabled" not in state:
        # Rows of a few tokens alone are no part of the sample that a fingerprint takes.
        assert print_.same_weights(base) is (kind == "some tokens")
        whole = copy.deepcopy(wrapped).merge_and_unload()
        assert print_ == TargetFingerprint.of(find_anatomy(whole))


@pytest.mark.parametrize("kind", ["lora", "embedding", "embedding and output", "saved whole", "some tokens"])
def test_tied_embeddings_are_told_apart(kind):
    check(trained(ADAPTERS[kind], tied=True))


@pytest.mark.parametrize("kind", ["lora", "dora", "embedding", "saved whole"])
def test_in_16_bits(kind):
    check(trained(ADAPTERS[kind], dtype=torch.bfloat16), tolerance=0.02)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_strength_of_an_adapter_is_part_of_the_target(scale):
    first, second = trained(ADAPTERS["lora"]), trained(ADAPTERS["lora"])
    for module in second.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(scale)
    check(second)
    assert not TargetFingerprint.of(find_anatomy(first)).same_weights(
        TargetFingerprint.of(find_anatomy(second))
    )


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * torch.linspace(0.5, 2, weight.shape[0])[:, None]


@pytest.mark.parametrize("where", ["lm_head", "embed_tokens", "norm"])
def test_parametrized_weights(where):
    model = tiny.llama()
    module = next(m for name, m in model.named_modules() if name.endswith(where))
    before = TargetFingerprint.of(find_anatomy(model))
    if where == "norm":
        parametrizations.weight_norm(module, dim=None)
        with torch.no_grad():
            module.parametrizations.weight.original0.mul_(1.5)
    else:
        parametrize.register_parametrization(module, "weight", Scaled())
    check(model)
    changed = TargetFingerprint.of(find_anatomy(model))
    assert changed.structure == before.structure
    assert not changed.same_weights(before)
    parametrize.remove_parametrizations(module, "weight")
    assert changed == TargetFingerprint.of(find_anatomy(model))


class Int8(nn.Module):
    """A linear layer with a weight in 8 bits, as quantisers make them."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.scale, self.bias)


class Int8Inputs(Int8):
    """The same, with the inputs rounded too: no matrix product."""

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / 7
        return super().forward((x / scale).round() * scale)


def test_a_quantised_projection_is_read_off_its_answers():
    model = tiny.llama()
    model.lm_head = Int8(model.lm_head)
    check(model)
    model.lm_head = Int8Inputs(tiny.llama().lm_head)
    with pytest.raises(HeadError, match="Int8Inputs computes something other than a matrix"):
        readout_of(find_anatomy(model), SPEC)


def test_forward_hooks_are_part_of_a_module():
    model = tiny.llama()
    shift = torch.randn(tiny.VOCAB, generator=torch.manual_seed(0))
    model.lm_head.register_forward_hook(lambda module, args, out: 1.5 * out + shift)
    check(model)
    model.lm_head.register_forward_hook(lambda module, args, out: out.relu())
    with pytest.raises(HeadError, match="Linear computes something other than a matrix product"):
        readout_of(find_anatomy(model), SPEC)


@pytest.mark.parametrize(
    ("change", "fits"),
    [(lambda out: out * 3, True), (lambda out: out.roll(1, -1), False), (lambda out: out + 1, False)],
)
def test_hooks_on_the_embedding(change, fits):
    module = tiny.llama().model.embed_tokens
    module.register_forward_hook(lambda module, args, out: change(out))
    if fits:  # a constant factor is the class's own, as Gemma's is: heads embed without it
        assert torch.equal(table(module), module.weight)
    else:
        with pytest.raises(BindError, match="computes something other than a row per token"):
            table(module)


@given(st.integers(1, 40), st.integers(1, 600), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_matrix_is_read_off_any_linear_module(rows, width, bias, seed):
    torch.manual_seed(seed)
    linear = nn.Linear(width, rows, bias)

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear

        def forward(self, x):
            return self.inner(x)

    weight, shift = projection(Hidden(), width)
    torch.testing.assert_close(weight, linear.weight.detach(), rtol=1e-5, atol=1e-6)
    if bias:
        assert torch.equal(shift, linear.bias)
    assert projection(linear, width)[0].data_ptr() == linear.weight.data_ptr()


def test_the_gain_of_a_norm():
    for family, one_more in (("llama", 0), ("gemma2", 1), ("gemma3", 1), ("olmo2", 0)):
        norm = find_anatomy(tiny.model(family)).final_norm
        torch.testing.assert_close(gain(norm, tiny.HIDDEN), norm.weight.detach() + one_more)
    layer_norm = find_anatomy(tiny.model("gpt2")).final_norm
    torch.testing.assert_close(gain(layer_norm, tiny.HIDDEN), layer_norm.weight.detach())
