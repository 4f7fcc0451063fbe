"""Fingerprints: blind to wrappers and names, honest about precision, sensitive to weights."""

import peft
import pytest
import torch
from torch import nn

from capture_hooks.capture import find_anatomy
from capture_hooks.capture.fingerprint import TargetFingerprint
from capture_hooks.errors import BindError
from capture_hooks.testing import tiny


def take(model):
    return TargetFingerprint.of(find_anatomy(model))


BASE = take(tiny.llama())


def test_it_names_the_model():
    config = tiny.llama().config
    assert BASE.architecture == "LlamaForCausalLM"
    assert BASE.model_type == "llama"
    assert BASE.n_layers == config.num_hidden_layers
    assert (BASE.hidden_size, BASE.vocab_size) == (config.hidden_size, config.vocab_size)
    assert BASE.dtype == "float32"
    assert TargetFingerprint.model_validate_json(BASE.model_dump_json()) == BASE
    assert len(BASE.model_dump_json()) < 1024


def test_the_same_model_again_is_the_same():
    assert take(tiny.llama()) == BASE
    assert BASE.differences(BASE) == []
    assert BASE.same_weights(BASE)


def lora(model, **config):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], **config))


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        lora,
        lambda model: torch.compile(lora(model)),
        lambda model: lora(model).merge_and_unload(),
    ],
    ids=["compile", "data-parallel", "lora", "compiled-lora", "unloaded-lora"],
)
def test_wrappers_that_change_nothing_are_not_seen(wrap):
    assert take(wrap(tiny.llama())) == BASE


def test_compiled_layers_are_not_seen():
    model = tiny.llama()
    for at, layer in enumerate(model.model.layers):
        model.model.layers[at] = torch.compile(layer)
    assert take(model).weights == BASE.weights


def test_an_adapter_that_changes_the_model_is_seen():
    trained = lora(tiny.llama(), init_lora_weights=False)
    assert not take(trained).same_weights(BASE)
    assert not take(trained.merge_and_unload()).same_weights(BASE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_is_the_same_weights_but_not_equal(dtype):
    cast = take(tiny.llama().to(dtype))
    assert cast != BASE
    assert cast.same_weights(BASE)
    assert BASE.same_weights(cast)
    (sentence,) = BASE.differences(cast)
    assert "the same to the precision of a cast" in sentence
    assert "float32 here" in sentence
    assert f"{cast.dtype} there" in sentence
    assert cast.weights[:12] in sentence
    assert BASE.weights[:12] in sentence


def test_two_casts_of_one_model_are_the_same_weights():
    assert take(tiny.llama().half()).same_weights(take(tiny.llama().bfloat16()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_weights_are_told_in_any_precision(dtype):
    other = take(tiny.llama(seed=1).to(dtype))
    assert not BASE.same_weights(other)
    assert any("the weights differ by" in sentence for sentence in BASE.differences(other))
    assert BASE.distance(other) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_slight_fine_tune_is_told_in_any_precision(dtype):
    model = tiny.llama()
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    assert not BASE.same_weights(take(model.to(dtype)))


def test_every_parameter_counts():
    model = tiny.llama()
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.mul_(1.01)
        assert take(model).weights != BASE.weights, name
        with torch.no_grad():
            parameter.copy_(kept)
    assert take(model) == BASE


def test_swapped_layers_are_seen():
    model = tiny.llama()
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[1], layers[0], *layers[2:]])
    assert not take(model).same_weights(BASE)


def test_tied_and_untied_copies_agree():
    tied = tiny.llama(tie_word_embeddings=True)
    untied = tiny.llama(tie_word_embeddings=True)
    untied.lm_head.weight = nn.Parameter(untied.lm_head.weight.detach().clone())
    assert take(tied).same_weights(take(untied))


def test_another_size_is_named_with_both_values():
    other = take(tiny.llama(num_hidden_layers=BASE.n_layers + 1, vocab_size=BASE.vocab_size + 8))
    text = "; ".join(BASE.differences(other))
    assert f"n_layers is {BASE.n_layers} here and {BASE.n_layers + 1} there" in text
    assert f"vocab_size is {BASE.vocab_size} here and {BASE.vocab_size + 8} there" in text
    assert "differ in name or shape" in text


def test_weights_that_are_not_there_are_an_error():
    anatomy = find_anatomy(tiny.llama())
    anatomy.model.to("meta")
    with pytest.raises(BindError, match="are not in memory"):
        TargetFingerprint.of(anatomy)
