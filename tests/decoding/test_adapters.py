"""Targets with adapters on them: the text is the adapted model's own, whatever is merged or switched off."""

import copy

import peft
import pytest
import torch

from capture_hooks.decoding import SpeculativeDecoder, packed
from capture_hooks.testing import tiny

IDS = torch.tensor([[3, 9, 40, 77, 5]])


def lora():
    """A tiny model with a LoRA that changes it, also in its output projection."""
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj", "lm_head"], r=2)
    model = peft.get_peft_model(tiny.llama(num_hidden_layers=2), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.manual_seed(len(name)))
    return model.eval()


@pytest.mark.parametrize("kernels", ["stock", "packed"])
def test_an_adapter_is_merged_and_switched_off_under_a_decoder(monkeypatch, eagle3_head, kernels):
    monkeypatch.setattr(packed, "_GAIN", 1e9)  # packed layouts are taken whether or not they are faster
    model = lora()
    decoder = SpeculativeDecoder(model, eagle3_head(model), 4, kernels=kernels)
    texts = []
    for change in (
        lambda: None,
        model.merge_adapter,
        model.base_model.disable_adapter_layers,  # taken out of the weights in the next forward
        model.base_model.enable_adapter_layers,
    ):
        change()
        expected = copy.deepcopy(model).generate(input_ids=IDS, do_sample=False, max_new_tokens=30)
        assert torch.equal(decoder.generate(IDS, 30, do_sample=False).sequences, expected)
        texts.append(expected)
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[3])
    assert not torch.equal(texts[0], texts[2])
