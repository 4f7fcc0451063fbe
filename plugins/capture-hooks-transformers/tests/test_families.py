"""Every point of every tiny family equals a re-computation that knows nothing of how it was found."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from transformers import CONFIG_MAPPING

from capture_hooks.capture import Anatomy, bind, find_anatomy
from capture_hooks.errors import HeadError
from capture_hooks.heads import readout_of
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny
from capture_hooks.testing.anatomy_check import Stream, check_anatomy, reference_norm
from capture_hooks.testing.tiny_families import FAMILIES

IDS = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(1))
EMBEDDING_SCALE = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma4"), math.sqrt(tiny.HIDDEN)),
    "granite": 3.0,
    "minicpm3": 2.0,
}
# What is written in each family's config or code; 1 and None elsewhere.
SCALE = {"cohere": 1 / 16, "granite": 1 / 6, "minicpm3": 8 / 32}
SOFTCAP = {"gemma2": 30.0, "nanochat": 15.0}
NO_FINAL_NORM = {"opt_350m"}
NO_READOUT = {"opt_350m"}


@functools.lru_cache(maxsize=1)
def prepared(family: str) -> tuple[torch.nn.Module, Anatomy, Stream]:
    model_type = FAMILIES[family].model_type
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {model_type}")
    model = tiny.model(family)
    anatomy = find_anatomy(model)
    first = 1 if family == "mamba" else 0
    stream = check_anatomy(
        anatomy, lambda: model(input_ids=IDS, use_cache=False, output_hidden_states=True), first
    )
    return model, anatomy, stream


def captured(model: torch.nn.Module, text: str) -> list[torch.Tensor]:
    spec = CaptureSpec.parse(text)
    with torch.no_grad(), bind(model, spec) as capture:
        model(input_ids=IDS, use_cache=False)
    return [capture.states[str(point)].view(*IDS.shape, -1) for point in spec.inputs]


def embedded(family: str, model: torch.nn.Module) -> torch.Tensor:
    """The stream before layer 0, from the definitions of the families."""
    weight = model.get_input_embeddings().weight.detach().double()
    x = weight[IDS] * EMBEDDING_SCALE.get(family, 1.0)
    positions = torch.arange(IDS.shape[1])
    if family == "gpt2":
        return x + model.transformer.wpe.weight.detach().double()[positions]
    if family.startswith("opt"):
        decoder = model.model.decoder
        if decoder.project_in is not None:
            x = x @ decoder.project_in.weight.detach().double().T
        return x + decoder.embed_positions.weight.detach().double()[positions + 2]
    if family == "nanochat":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    if family == "bloom":
        return reference_norm(model.transformer.word_embeddings_layernorm, x.float())
    return x


@pytest.mark.parametrize("family", tiny.families())
def test_every_point_is_what_it_says(family):
    model, anatomy, stream = prepared(family)
    n = anatomy.n_layers
    assert n == tiny.LAYERS
    embed, *post = captured(model, "embed, " + ", ".join(f"post.{k}" for k in range(n)))
    torch.testing.assert_close(embed.double(), embedded(family, model), rtol=1e-6, atol=1e-7)
    pre = captured(model, ", ".join(f"pre.{k}" for k in range(n)))
    for k in range(n):
        assert torch.equal(pre[k], stream.boundaries[k])
        assert torch.equal(post[k], stream.boundaries[k + 1])
    assert (anatomy.final_norm is None) == (family in NO_FINAL_NORM)
    if anatomy.final_norm is not None:
        (normed,) = captured(model, "final_norm")
        size = normed.abs().max().item()
        torch.testing.assert_close(
            normed.double(), reference_norm(anatomy.final_norm, post[-1]), rtol=0, atol=1e-6 * size
        )


@pytest.mark.parametrize("family", tiny.families())
def test_readout_gives_the_models_logits(family):
    model, anatomy, stream = prepared(family)
    assert anatomy.logit_scale == SCALE.get(family, 1.0)
    assert anatomy.logit_softcap == SOFTCAP.get(family)
    assert anatomy.vocab_size == tiny.VOCAB
    assert anatomy.hidden_size == tiny.HIDDEN
    for target in ("final_norm", "post.-1"):
        spec = CaptureSpec.parse(f"post.1 -> {target}")
        if family in NO_READOUT:
            with pytest.raises(HeadError, match="project_out"):
                readout_of(anatomy, spec)
            continue
        (state,) = captured(model, target)
        with torch.no_grad():
            logits = readout_of(anatomy, spec).logits(state)
        size = stream.logits.abs().max().item()
        torch.testing.assert_close(logits, stream.logits, rtol=0, atol=2e-6 * size)
