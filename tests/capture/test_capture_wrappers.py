"""The same states through whatever a model is wrapped in."""

import functools
import socket

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import dispatch_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from capture_hooks import bind
from capture_hooks.capture import find_anatomy
from capture_hooks.errors import BindError
from capture_hooks.testing import tiny

SPEC = "post.1, embed, post.3"
IDS = torch.tensor([[5, 9, 3, 7], [8, 8, 4, 6]])


def captured(model, spec=SPEC):
    with torch.no_grad(), bind(model, spec, target=True) as capture:
        model(input_ids=IDS, use_cache=False)
    return torch.cat([capture.states.packed, capture.states.target], dim=1)


@functools.cache
def plain():
    return captured(tiny.llama())


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


class Holder(nn.Module):
    """A user's own wrapper."""

    def __init__(self, inner):
        super().__init__()
        self.language_model = inner

    def forward(self, *args, **kwargs):
        return self.language_model(*args, **kwargs)


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))


def checkpointed_layers(model, **kwargs):
    decoder = find_anatomy(model).decoder
    for k, layer in enumerate(decoder.layers):
        decoder.layers[k] = checkpoint_wrapper(layer, **kwargs)
    return model


INSIDE = {"lora": lora, "checkpointed layers": checkpointed_layers}
AROUND = {"holder": Holder, "data parallel": nn.DataParallel, "holder again": Holder, "lora": lora}


@given(
    inside=st.sampled_from([None, *INSIDE]),
    around=st.lists(st.sampled_from(["holder", "data parallel", "holder again"]), max_size=3, unique=True),
)
@settings(deadline=None, max_examples=15)
def test_any_order_of_wrappers_gives_the_same_states(inside, around):
    model = tiny.llama()
    if inside is not None:
        model = INSIDE[inside](model)
    for name in around:
        model = AROUND[name](model)
    assert type(find_anatomy(model).model).__name__ == "LlamaForCausalLM"
    assert torch.equal(captured(model), plain())


def test_names_of_modules_ignore_wrappers():
    spec = "out:model.layers.2.mlp, post.0"
    expected = captured(tiny.llama(), spec)
    assert torch.equal(captured(checkpointed_layers(tiny.llama()), spec), expected)
    assert torch.equal(captured(Holder(lora(tiny.llama())), spec), expected)


def test_distributed_data_parallel(one_process):
    assert torch.equal(captured(nn.parallel.DistributedDataParallel(tiny.llama())), plain())


def test_fully_sharded(one_process):
    from torch.distributed.fsdp import fully_shard

    model = tiny.llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert torch.equal(captured(model), plain())
    with torch.no_grad(), bind(model, "post.1") as capture:
        capture.run(IDS, stop=True)
        model(input_ids=IDS, use_cache=False)
    assert torch.equal(capture.states.packed[:8], capture.states.packed[8:])


def test_a_device_map_patches_forward_and_hides_nothing():
    model = tiny.llama()
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], "cpu")
    places |= {f"model.layers.{k}": "cpu" for k in range(6)}
    model = dispatch_model(model, device_map=places, main_device="cpu", force_hooks=True)
    assert torch.equal(captured(model), plain())


class Elsewhere(nn.Module):
    """Layers of one stream on two devices (``meta`` stands for the other: it holds no values)."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, device="meta")

    def forward(self, x):
        return self.second(self.first(x).to("meta"))


def test_states_stay_on_their_layers_device_until_they_are_packed():
    from capture_hooks.capture import Anatomy

    model = Elsewhere()
    anatomy = Anatomy(
        model=model,
        decoder=model,
        decoder_name="",
        layers=(model.first, model.second),
        layer_names=("first", "second"),
        embedding=model.first,
        final_norm=None,
        final_norm_name=None,
        lm_head=model.second,
        hidden_size=4,
        vocab_size=4,
    )
    with torch.no_grad(), bind(model, "post.1, post.0", anatomy=anatomy) as capture:
        model(torch.randn(2, 3, 4))
        (forward,) = capture._pack._new
    assert forward.packed.device.type == "cpu"
    assert forward.loose[0].device.type == "meta"


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", ["transformers", "wrapper"])
def test_recomputation_in_a_backward_adds_no_rows(reentrant, way):
    model = tiny.llama().train()
    spec = f"{SPEC}, out:model.layers.2.mlp"
    if way == "transformers":
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": reentrant})
    else:
        kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        checkpointed_layers(model, checkpoint_impl=kind)
    fired = []
    model.model.layers[2].get_submodule(
        "mlp" if way == "transformers" else "_checkpoint_wrapped_module.mlp"
    ).register_forward_pre_hook(lambda m, a: fired.append(1))
    model.model.embed_tokens.register_forward_hook(lambda m, a, o: o.requires_grad_())
    with bind(model, spec) as capture:
        for _ in range(2):
            model(input_ids=IDS, use_cache=False).logits.sum().backward()
            assert capture.states.requests == len(capture.states) // 4
    assert len(fired) == 4  # the second and fourth time in a backward
    assert len(capture.states) == 16
    assert torch.equal(capture.states.packed[:8], capture.states.packed[8:])


class Int8Linear(nn.Module):
    """A linear whose weight is packed to eight bits, as bitsandbytes does: nothing tells its width."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8).view(torch.uint8).flatten()[:, None]
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x):
        weight = self.weight.view(torch.int8).view(self.scale.shape[0], -1).to(x.dtype) * self.scale
        return nn.functional.linear(x, weight)


def test_a_quantised_target_is_captured_at_its_blocks():
    model = tiny.llama()
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, Int8Linear(child))
    seen = {}
    model.model.layers[1].register_forward_hook(lambda m, a, o: seen.update(post=o.clone()))
    with torch.no_grad(), bind(model, f"{SPEC}, out:model.layers.1.mlp.up_proj", target=True) as capture:
        model(input_ids=IDS, use_cache=False)
    assert torch.equal(capture.states["post.1"], seen["post"].flatten(0, 1))
    assert capture.states["out:model.layers.1.mlp.up_proj"].shape == (8, 48)


class Provider:
    """Knows `Holder` models, as well as it is told."""

    def __init__(self, name, score, inside=()):
        self.name, self._score, self._inside = name, score, inside

    def match(self, model):
        return self._score if isinstance(model, Holder) else 0

    def unwrap(self, model):
        return self._inside if isinstance(model, Holder) else ()

    def describe(self, model):
        raise BindError(f"described by {self.name}")


def test_the_provider_that_knows_a_model_best_describes_it():
    providers = {"general": Provider("general", 1), "special": Provider("special", 5)}
    with pytest.raises(BindError, match="described by special"):
        find_anatomy(Holder(nn.Linear(2, 2)), providers)


def test_a_tie_names_both_providers():
    providers = {
        "first": Provider("first", 2),
        "second": Provider("second", 2),
        "third": Provider("third", 1),
    }
    with pytest.raises(BindError, match=r"'first' and 'second' claim Holder equally well \(score 2\)"):
        find_anatomy(Holder(nn.Linear(2, 2)), providers)


def test_a_model_nobody_knows_names_what_is_installed():
    with pytest.raises(
        BindError, match=r"no installed anatomy provider knows Sequential \(installed: .*transformers"
    ):
        find_anatomy(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(BindError, match="installed: none"):
        find_anatomy(nn.Linear(2, 2), {})


def test_a_wrapper_of_several_models_is_an_error():
    inside = (nn.Linear(1, 1), nn.ReLU())
    with pytest.raises(BindError, match=r"holds several models according to 'two' \(Linear, ReLU\)"):
        find_anatomy(Holder(inside[0]), {"two": Provider("two", 1, inside)})
