"""``torch.compile`` around a model, inside it, before and after other wrappers.

Compiling a whole transformers model takes many seconds; all but one of these compile a small decoder.
"""

import peft
import pytest
import torch
from torch import nn

from capture_hooks import bind
from capture_hooks.capture import Anatomy, find_anatomy
from capture_hooks.errors import CaptureError
from capture_hooks.testing import tiny

SPEC = "post.1, embed"
IDS = torch.tensor([[5, 9, 3, 7], [8, 8, 4, 6]])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.mlp(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.norm = nn.LayerNorm(8)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.decoder, self.head = Decoder(), nn.Linear(8, 16)

    def forward(self, input_ids):
        return self.head(self.decoder(input_ids))


class Provider:
    name = "test"

    def match(self, model):
        return int(isinstance(model, Model))

    def unwrap(self, model):
        return ()

    def describe(self, model):
        decoder = model.decoder._modules.get("_orig_mod", model.decoder)
        return Anatomy(
            model=model,
            decoder=model.decoder,
            decoder_name="decoder",
            layers=tuple(decoder.layers),
            layer_names=tuple(f"decoder.layers.{k}" for k in range(3)),
            embedding=decoder.embed,
            final_norm=decoder.norm,
            final_norm_name="decoder.norm",
            lm_head=model.head,
            hidden_size=8,
            vocab_size=16,
        )


def bound(model, spec=SPEC):
    return bind(model, spec, target=True, anatomy=find_anatomy(model, {"test": Provider()}))


def captured(model, spec=SPEC, times=1):
    with torch.no_grad(), bound(model, spec) as capture:
        for _ in range(times):
            model(IDS)
    return torch.cat([capture.states.packed, capture.states.target], dim=1)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def plain():
    return captured(Model())


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["mlp"], r=2))


def compiled(model):
    return torch.compile(model, backend="eager")


def in_place(model):
    model.compile(backend="eager")
    return model


def decoder_only(model):
    model.decoder = compiled(model.decoder)
    return model


def layer_by_layer(model):
    for k, layer in enumerate(model.decoder.layers):
        model.decoder.layers[k] = compiled(layer)
    return model


def layers_in_place(model):
    for layer in model.decoder.layers:
        in_place(layer)
    return model


WAYS = [compiled, in_place, decoder_only, layer_by_layer, layers_in_place]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_compiled_any_way_and_bound_before_its_first_call_is_captured_every_time(way, plain):
    assert torch.equal(captured(way(Model()), times=3), plain.repeat(3, 1))


@pytest.mark.parametrize("way", [layer_by_layer, layers_in_place])
def test_layers_compiled_and_run_one_by_one_are_captured(way, plain):
    model = way(Model())
    with torch.no_grad():
        model(IDS)
    assert torch.equal(captured(model), plain)


@pytest.mark.parametrize(
    "way", [lambda m: compiled(lora(m)), lambda m: lora(layer_by_layer(m)), lambda m: lora(m)]
)
def test_compiled_before_or_after_peft(way, plain):
    assert torch.equal(captured(way(Model())), plain)


@pytest.mark.parametrize("way", [compiled, in_place, decoder_only, lambda m: compiled(lora(m))])
def test_hooks_that_compiled_code_ignores_are_an_error(way, plain):
    model = way(Model())
    with torch.no_grad():
        model(IDS)
        with (
            bound(model),
            pytest.raises(CaptureError, match=r"fired in a forward of .*compiled code.*dynamo\.reset"),
        ):
            model(IDS)
    torch._dynamo.reset()
    assert torch.equal(captured(model), plain)


def test_an_uncompiled_call_in_between_does_not_hide_that_compiled_code_ignores_the_hooks():
    inner = Model()
    model = compiled(lora(inner))
    with torch.no_grad():
        model(IDS)
        with bound(model) as capture:
            inner(IDS)
            assert len(capture.states) == 8
            with pytest.raises(CaptureError, match="compiled code"):
                model(IDS)


def test_another_compiled_instance_of_the_class_can_hide_the_hooks_but_not_silently():
    with torch.no_grad():
        compiled(Model())(IDS)
        second = compiled(Model(seed=1))
        with bound(second), pytest.raises(CaptureError, match="another instance of its class"):
            second(IDS)


def test_a_module_inside_layers_that_share_their_compiled_code_is_named():
    spec = "out:decoder.layers.1.mlp, post.0"
    model = layer_by_layer(Model())
    missed = pytest.raises(
        CaptureError, match=r"never fired .*layers\.1\.mlp.*skip_nnmodule_hook_guards = False"
    )
    with torch.no_grad(), bound(model, spec), missed:
        model(IDS)  # layer 1 reuses what was compiled for layer 0, where no hook was
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        assert torch.equal(captured(model, spec), captured(Model(), spec))


def test_a_session_left_and_entered_again_captures_or_says_why(plain):
    model = compiled(Model())
    capture = bound(model)
    with torch.no_grad():
        for _ in range(3):
            try:
                with capture:
                    model(IDS)
            except CaptureError as error:
                assert "compiled code" in str(error)  # noqa: PT017  # either outcome is right, a wrong tensor is not
                torch._dynamo.reset()
            else:
                assert torch.equal(torch.cat([capture.states.packed, capture.states.target], 1), plain)


def test_compiling_inside_the_session_is_fine(plain):
    model = Model()
    with torch.no_grad(), bound(model) as capture:
        compiled(model)(IDS)
    assert torch.equal(torch.cat([capture.states.packed, capture.states.target], 1), plain)


def test_an_early_stop_leaves_a_compiled_model_usable():
    model = compiled(Model())
    with torch.no_grad(), bind(model, "post.1", anatomy=find_anatomy(model, {"test": Provider()})) as capture:
        assert capture.run(IDS, stop=True) is None
        model(IDS)
    assert torch.equal(capture.states.packed[:8], capture.states.packed[8:])


def test_a_static_buffer_needs_no_break_in_the_graph_around_a_layer():
    out = torch.zeros(8, 16)
    model = layers_in_place(Model())
    anatomy = find_anatomy(model, {"test": Provider()})
    with torch.no_grad(), bind(model, SPEC, out=out, anatomy=anatomy) as capture:
        model(IDS)
    assert torch.equal(capture.states.packed, out)


def test_a_compiled_transformers_model():
    model = tiny.llama(num_hidden_layers=2)  # each frame of transformers' own wrappers is compiled: slow
    with torch.no_grad(), bind(model, SPEC, target=True) as capture:
        model(input_ids=IDS, use_cache=False)
    expected = capture.states
    whole = compiled(model)
    with torch.no_grad(), bind(whole, SPEC, target=True) as capture:
        for _ in range(2):
            whole(input_ids=IDS, use_cache=False)
    for at in (slice(0, 8), slice(8, 16)):
        torch.testing.assert_close(capture.states.packed[at], expected.packed)
        torch.testing.assert_close(capture.states.target[at], expected.target)
