"""What the plugin makes of models that are not plain, and of models that were changed or wrapped."""

from __future__ import annotations

import pytest
import torch
from capture_hooks_transformers.provider import TransformersAnatomy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaModel

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.errors import BindError
from capture_hooks.plugins import registry
from capture_hooks.testing import tiny
from capture_hooks.testing.anatomy_check import check_anatomy
from capture_hooks.testing.contracts.anatomy import AnatomyContract

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


class TestContract(AnatomyContract):
    def provider(self):
        return TransformersAnatomy()

    def model(self):
        return tiny.llama()


class TestContractOfAFamilyThatNamesThingsOtherwise(AnatomyContract):
    def provider(self):
        return TransformersAnatomy()

    def model(self):
        return tiny.model("gpt2")


def test_the_installed_plugin_is_found():
    assert isinstance(registry().anatomies["transformers"], TransformersAnatomy)


def describe(model):
    return TransformersAnatomy().describe(model)


def random(model_class, **settings):
    config = tiny.llama().config
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = model_class(config)
    tiny.randomise(model)
    return model.eval()


# --- models whose stream is not plain -------------------------------------------------------------


def llama_with(forward_layers):
    """A Llama whose loop over the layers is replaced: ``forward_layers(decoder, hidden, keywords)``."""

    class Decoder(LlamaModel):
        def forward(self, input_ids=None, inputs_embeds=None, position_ids=None, **kwargs):
            hidden = self.embed_tokens(input_ids)
            positions = torch.arange(hidden.shape[1])[None]
            keywords = {"position_embeddings": self.rotary_emb(hidden, position_ids=positions)}
            from transformers.modeling_outputs import BaseModelOutputWithPast

            return BaseModelOutputWithPast(last_hidden_state=forward_layers(self, hidden, keywords))

    class Model(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = Decoder(config)

    return random(Model)


def test_the_toy_itself_is_plain():
    def plain(decoder, x, keywords):
        for layer in decoder.layers:
            x = layer(x, **keywords)
        return decoder.norm(x)

    model = llama_with(plain)
    check_anatomy(describe(model), lambda: model(input_ids=IDS, use_cache=False))


def added_between(decoder, x, keywords):
    for layer in decoder.layers:
        x = layer(x, **keywords) + 1
    return decoder.norm(x)


def added_in_place(decoder, x, keywords):
    for layer in decoder.layers:
        x = layer(x, **keywords)
        x += 1
    return decoder.norm(x)


def residual_outside(decoder, x, keywords):
    for layer in decoder.layers:
        x = x + layer(decoder.norm(x), **keywords)
    return decoder.norm(x)


def looped(decoder, x, keywords):
    for layer in (*decoder.layers, *decoder.layers):
        x = layer(x, **keywords)
    return decoder.norm(x)


def backwards(decoder, x, keywords):
    for layer in reversed(decoder.layers):
        x = layer(x, **keywords)
    return decoder.norm(x)


def skipped(decoder, x, keywords):
    for layer in decoder.layers[:-1]:
        x = layer(x, **keywords)
    return decoder.norm(x)


def past_call(decoder, x, keywords):
    for layer in decoder.layers:
        x = layer.forward(x, **keywords)
    return decoder.norm(x)


def transposed(decoder, x, keywords):
    cos, sin = keywords["position_embeddings"]
    x = x.transpose(0, 1)
    for layer in decoder.layers:
        x = layer(x, position_embeddings=(cos[:, :1], sin[:, :1]))
    return decoder.norm(x.transpose(0, 1))


def two_streams(decoder, x, keywords):
    other = x
    for layer in decoder.layers:
        fresh = layer(x, attention_bias=other, **keywords)
        other, x = other * 2, fresh
    return decoder.norm(x)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (added_between, r"changes the stream between model\.layers\.0 and model\.layers\.1"),
        (added_in_place, r"changes the stream between model\.layers\.0 and model\.layers\.1"),
        (residual_outside, r"changes the stream between model\.layers\.0 and model\.layers\.1"),
        (looped, r"each called once and in order.*0, 1, 2, 3, 4, 5, 0, 1"),
        (backwards, r"each called once and in order.*5, 4, 3, 2, 1, 0"),
        (skipped, r"each called once and in order.*0, 1, 2, 3, 4\]"),
        (past_call, r"each called once and in order.*none through __call__"),
        (transposed, r"takes a tensor of shape \[3, 2, 32\] for 2 sequences of 3 tokens"),
        (two_streams, r"takes a second tensor of the stream's width"),
    ],
)
def test_a_loop_that_is_not_plain_is_refused(loop, message):
    with pytest.raises(BindError, match=message):
        describe(llama_with(loop))


def test_a_layer_used_twice_is_refused():
    class Shared(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[3] = self.model.layers[2]

    with pytest.raises(BindError, match="each called once and in order"):
        describe(random(Shared))


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        # Gemma 3n's AltUp carries four versions of the stream; XLNet runs tokens first.
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 0, "head_dim": 8, "num_key_value_heads": 2, "layer_types": None},
            r"takes a tensor of shape \[4, 2, 3, 32\]",
        ),
        (
            "xlnet",
            {"d_model": 32, "n_layer": 6, "n_head": 4, "d_inner": 48},
            r"takes a tensor of shape \[3, 2, 32\]",
        ),
    ],
)
def test_families_with_other_streams_are_refused(model_type, settings, message):
    common = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if model_type == "gemma3n_text":
        common |= {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
        }
        common |= {
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
            "activation_sparsity_pattern": None,
        }
    config = AutoConfig.for_model(model_type, **common, **settings)
    with pytest.raises(BindError, match=message):
        describe(AutoModelForCausalLM.from_config(config))


def test_an_encoder_decoder_is_refused():
    config = AutoConfig.for_model("t5", d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, vocab_size=64)
    with pytest.raises(BindError, match="encoder-decoder"):
        describe(AutoModelForSeq2SeqLM.from_config(config))


def test_a_model_without_its_head_is_refused():
    with pytest.raises(BindError, match=r"no output embeddings.*AutoModelForCausalLM"):
        describe(AutoModel.from_config(tiny.llama().config))


def test_another_librarys_model_is_refused():
    provider, model = TransformersAnatomy(), nn.Linear(2, 2)
    assert provider.match(model) == 0
    with pytest.raises(BindError, match="Linear is not a Hugging Face model"):
        provider.describe(model)


# --- what happens around lm_head ----------------------------------------------------------------


def test_a_scale_written_in_code_is_measured_and_one_only_in_the_config_is_not():
    class Scaled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3
            return out

    model = random(Scaled, logit_scale=7.0)
    anatomy = describe(model)
    assert anatomy.logit_scale == 3.0
    check_anatomy(anatomy, lambda: model(input_ids=IDS, use_cache=False))


def test_logits_that_are_no_scaled_projection_have_a_reason():
    class Masked(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits[..., 5] = -100.0
            return out

    anatomy = describe(random(Masked))
    assert (
        anatomy.readout_gap == "the model changes logits after lm_head by more than a factor and a soft cap"
    )


def test_a_head_that_is_more_than_a_projection_has_a_reason():
    settings = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = AutoConfig.for_model("bert", vocab_size=64, is_decoder=True, **settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    anatomy = describe(model)
    assert anatomy.layer_names[0] == "bert.encoder.layer.0"
    assert anatomy.final_norm is None
    assert "cls (BertOnlyMLMHead)" in (anatomy.readout_gap or "")
    check_anatomy(anatomy, lambda: model(input_ids=IDS, use_cache=False))


# --- nested multimodal models -------------------------------------------------------------------


def test_deepstack_keeps_post_and_the_next_pre_apart():
    """Qwen3-VL adds visual features after layers 0 and 1 here: exactly at the image's tokens."""
    model = tiny.model("qwen3_vl")
    assert describe(model).split_boundaries == {1, 2}
    vision = model.config.vision_config
    patches, merged = 16, 4  # 4 x 4 patches, merged 2 x 2
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    image = [model.config.vision_start_token_id, *[model.config.image_token_id] * merged]
    ids = torch.tensor([[5, *image, model.config.vision_end_token_id, 6, 7]])
    is_image = (ids == model.config.image_token_id)[0]
    inputs = {
        "input_ids": ids,
        "mm_token_type_ids": is_image[None].long(),
        "pixel_values": torch.randn(patches, width, generator=torch.Generator().manual_seed(0)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    with torch.no_grad(), bind(model, "post.0, pre.1, post.1, pre.2, post.2") as capture:
        model(**inputs, use_cache=False)
    states = capture.states
    for k in (0, 1):
        moved = (states[f"post.{k}"] != states[f"pre.{k + 1}"]).any(-1)
        assert torch.equal(moved, is_image)
    with torch.no_grad(), bind(model, "pre.3") as capture:
        model(**inputs, use_cache=False)
    assert torch.equal(capture.states["pre.3"], states["post.2"])


def test_the_text_decoder_is_found_not_the_vision_tower():
    for family in ("gemma3", "llava", "qwen3_vl"):
        model = tiny.model(family)
        assert describe(model).layer_names == tuple(
            f"model.language_model.layers.{k}" for k in range(tiny.LAYERS)
        )


# --- the live model is not the skeleton -----------------------------------------------------------


def test_layers_cut_after_building_are_noticed():
    model = tiny.llama()
    model.model.layers = model.model.layers[:4]
    with pytest.raises(BindError, match=r"no '4' in model\.layers: it was changed after it was built"):
        describe(model)


def test_layers_added_after_building_are_noticed():
    model = tiny.llama(num_hidden_layers=4)
    model.model.layers.append(tiny.llama().model.layers[0])
    with pytest.raises(BindError, match=r"holds 5 layers in model\.layers, but its config says 4"):
        describe(model)


def test_layers_inside_wrappers_are_found():
    model = tiny.llama()
    plain = describe(model)
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    model.model.layers[2] = torch.compile(model.model.layers[2], backend="eager")
    wrapped = describe(model)
    assert wrapped.layer_names == plain.layer_names
    assert wrapped.layers[1] is model.model.layers[1]
    assert wrapped.layers[2] is model.model.layers[2]


def test_peft_models_are_found_through_their_wrapper():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny.llama(), config).eval()
    anatomy = find_anatomy(model)
    check_anatomy(anatomy, lambda: model(input_ids=IDS, use_cache=False))


def test_describing_costs_no_random_numbers_and_no_weights():
    model = tiny.model("qwen3")
    before = torch.get_rng_state()
    anatomy = describe(model)
    assert torch.equal(before, torch.get_rng_state())
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert anatomy.lm_head is model.lm_head


def test_a_big_model_is_described_on_the_meta_device():
    """Seventy billion parameters: nothing of that size is ever made."""
    big = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    }
    config = AutoConfig.for_model("llama", vocab_size=128256, num_hidden_layers=12, **big)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    anatomy = describe(model)
    assert (anatomy.n_layers, anatomy.hidden_size, anatomy.vocab_size) == (12, 8192, 128256)


def test_half_precision_models_are_described_alike():
    full, half = tiny.model("gpt2"), tiny.model("gpt2").half()
    assert isinstance(half, GPT2LMHeadModel)
    assert describe(full).layer_names == describe(half).layer_names
