"""How heads are made for real (tiny) targets: settings taken over, starting weights, RoPE, precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from capture_hooks_eagle3 import Eagle3Config, Eagle3Head
from capture_hooks_eagle3.plugin import capture_hooks_heads
from capture_hooks_eagle3.provider import Eagle3Provider
from capture_hooks_eagle3.rope import RotaryTable, inverse_frequencies
from capture_hooks_eagle3.start import norm_gain
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.errors import HeadError
from capture_hooks.heads.contract import HeadProvider, TargetReadout, TrainBatch
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

SPEC = CaptureSpec.parse("post.0, post.1, post.-1")


def anatomy_of(model: nn.Module, decoder: nn.Module, norm: nn.Module, layers: nn.ModuleList) -> Anatomy:
    return Anatomy(
        model=model,
        decoder=decoder,
        decoder_name="",
        layers=tuple(layers),
        layer_names=tuple(str(i) for i in range(len(layers))),
        embedding=model.get_input_embeddings(),
        final_norm=norm,
        final_norm_name="norm",
        lm_head=model.get_output_embeddings(),
        hidden_size=model.config.hidden_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
    )


def llama(**overrides: object) -> Anatomy:
    model = tiny.llama(**overrides)
    return anatomy_of(model, model.model, model.model.norm, model.model.layers)


def create(anatomy: Anatomy, config: Eagle3Config, spec: CaptureSpec = SPEC) -> Eagle3Head:
    ids = torch.arange(0, anatomy.vocab_size, 2)
    torch.manual_seed(0)
    return Eagle3Provider().create(config, spec, anatomy, TargetReadout(anatomy.lm_head.weight), ids)


def test_the_plugin_contributes_one_provider() -> None:
    (provider,) = capture_hooks_heads()
    assert isinstance(provider, HeadProvider)
    assert (provider.name, provider.config_type) == ("eagle3", Eagle3Config)


def test_settings_come_from_the_target() -> None:
    anatomy = llama(rms_norm_eps=1e-4)
    config = anatomy.model.config
    head = create(anatomy, Eagle3Config())
    sizes = head.sizes
    assert (sizes.heads, sizes.kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (sizes.intermediate_size, sizes.rms_norm_eps) == (config.intermediate_size, 1e-4)
    assert sizes.rope == config.rope_parameters
    assert head.target_layers == config.num_hidden_layers
    assert [p.layer for p in head.spec.inputs] == [0, 1, config.num_hidden_layers - 1]
    assert create(anatomy, Eagle3Config(intermediate_size=24, head_dim=6)).sizes.intermediate_size == 24


def test_the_embedding_is_shared_and_frozen() -> None:
    anatomy = llama()
    head = create(anatomy, Eagle3Config())
    assert head.embedding.data_ptr() == anatomy.embedding.weight.data_ptr()
    trained = {name for name, p in head.named_parameters() if p.requires_grad}
    assert "embedding" not in trained
    assert "lm_head.weight" not in trained
    own = create(anatomy, Eagle3Config(train_embedding=True, train_lm_head=True))
    assert own.embedding.data_ptr() != anatomy.embedding.weight.data_ptr()
    assert {n for n, p in own.named_parameters() if p.requires_grad} - trained == {
        "embedding",
        "lm_head.weight",
    }


def test_the_output_starts_as_the_targets() -> None:
    anatomy = llama()
    head = create(anatomy, Eagle3Config(norm_init=0.25))
    assert torch.equal(head.lm_head.weight, anatomy.lm_head.weight[head.draft_token_ids])
    torch.testing.assert_close(head.norm.weight, 0.25 * anatomy.final_norm.weight)


def test_the_gain_of_any_final_norm_is_found() -> None:
    torch.manual_seed(0)
    base = llama()
    gemma = tiny.model("gemma2")
    norm = gemma.model.norm
    found = norm_gain(replace(base, final_norm=norm, hidden_size=norm.weight.shape[0]))
    torch.testing.assert_close(found, 1 + norm.weight, rtol=1e-4, atol=1e-4)
    layer_norm = nn.LayerNorm(6)
    nn.init.normal_(layer_norm.weight)
    nn.init.normal_(layer_norm.bias)
    found = norm_gain(replace(base, final_norm=layer_norm, hidden_size=6))
    torch.testing.assert_close(found, layer_norm.weight.detach())
    assert torch.equal(norm_gain(replace(base, final_norm=None, hidden_size=3)), torch.ones(3))


def test_a_target_layer_starts_the_head() -> None:
    """With the embedding's columns zeroed, the head repeats the target's layer on the last captured state."""
    anatomy = llama()
    head = create(anatomy, Eagle3Config(init_layer=-1)).eval()
    hidden = anatomy.hidden_size
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(head.layers[0].self_attn, name).weight[:, :hidden] = 0
        head.fc.weight[:, :-hidden] = 0
    states = torch.randn(5, 3 * hidden)
    drafted = head.extend(head.new_cache(5), states, torch.arange(5), 0)
    position = torch.arange(5).unsqueeze(0)
    rotary = anatomy.decoder.rotary_emb(states, position)
    mask = torch.full((5, 5), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        wanted = anatomy.layers[-1](
            states[None, :, -hidden:], attention_mask=mask, position_embeddings=rotary
        )
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(drafted, wanted.view(5, hidden), rtol=1e-4, atol=1e-4)


def test_a_layer_that_does_not_fit_is_refused() -> None:
    anatomy = llama()
    with pytest.raises(HeadError, match="outside a target"):
        create(anatomy, Eagle3Config(init_layer=99))
    with pytest.raises(HeadError, match=r"mlp\.gate_proj\.weight of the target is"):
        create(anatomy, Eagle3Config(init_layer=0, intermediate_size=4))
    gpt2 = tiny.model("gpt2")
    other = anatomy_of(gpt2, gpt2.transformer, gpt2.transformer.ln_f, gpt2.transformer.h)
    with pytest.raises(HeadError, match="only Llama-type layers"):
        create(other, Eagle3Config(init_layer=0))
    assert create(other, Eagle3Config()).sizes.rope == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "no multiple of kv_heads = 3"),
        ({"steps": 0}, "steps must be greater than or equal to 1, not 0"),
        ({"head_dim": 3}, "head_dim = 3 must be even"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"step_decay": 0.0}, r"step_decay must be greater than 0, not 0\.0"),
        ({"feature_noise": -1.0}, r"feature_noise must be greater than or equal to 0, not -1\.0"),
        ({"outside": "drop"}, "outside must be 'skip' or 'renormalise', not 'drop'"),
        ({"lm_head_init": "zero"}, "lm_head_init must be 'target' or 'random', not 'zero'"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings_: dict, message: str) -> None:
    with pytest.raises(HeadError, match=message):
        Eagle3Config(**settings_)


def test_unfilled_settings_and_bad_draft_ids_are_refused() -> None:
    anatomy = llama()
    readout = TargetReadout(anatomy.lm_head.weight)
    with pytest.raises(HeadError, match="heads, kv_heads"):
        Eagle3Head(Eagle3Config(), SPEC, 4, anatomy.embedding.weight, readout, torch.arange(3))
    filled = Eagle3Config().filled(anatomy)
    for ids in (torch.tensor([3, 1]), torch.tensor([0, anatomy.vocab_size]), torch.tensor([-1, 2])):
        with pytest.raises(HeadError, match="must ascend without repeats"):
            Eagle3Head(filled, SPEC, 4, anatomy.embedding.weight, readout, ids)
    with pytest.raises(HeadError, match="non-empty int64"):
        Eagle3Head(filled, SPEC, 4, anatomy.embedding.weight, readout, torch.zeros(0))


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_equals_transformers(kind: str) -> None:
    from capture_hooks_eagle3.functional import rotate

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters=dict(ROPES[kind]),
    )
    positions = torch.tensor([0, 1, 7, 100, 499])
    q = torch.randn(5, 4, 16)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    wanted, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    table = RotaryTable(*inverse_frequencies(ROPES[kind], 16, 512)).upto(500, q.device, q.dtype)
    own = rotate(q, table[0][positions], table[1][positions])
    # transformers multiplies angles in float32: at position 499 that is worth about 3e-5.
    torch.testing.assert_close(own, wanted[0].transpose(0, 1), rtol=1e-4, atol=2e-4)


def batch_for(head: Eagle3Head, states: Tensor) -> TrainBatch:
    rng = torch.Generator().manual_seed(0)
    rows = states.shape[0]
    return TrainBatch(
        states=states,
        target=torch.randn(rows, head.hidden_size, generator=rng),
        token_ids=torch.randint(head.vocab_size, (rows,), generator=rng),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        starts=torch.tensor([0, rows]),
    )


@pytest.mark.parametrize("norm", ["", "norm_before_fc", "fc_norm"])
def test_calibration_evens_out_channels_and_leaves_out_sinks(norm: str) -> None:
    head = create(llama(), Eagle3Config(**({norm: True} if norm else {})))
    scales = torch.rand(head.inputs * head.hidden_size) * 30 + 0.01
    states = torch.randn(4000, len(scales)) * scales
    states[0] *= 1e4
    head.calibrate(states)
    rms = (head.features(states[1:]) * head.input_scale).square().mean(0).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), rtol=2e-3, atol=2e-3)
    off = create(llama(), Eagle3Config(scale_inputs=False))
    off.calibrate(states)
    assert torch.equal(off.input_scale, torch.ones_like(scales))


def test_calibration_changes_nothing_that_fc_has_learnt() -> None:
    """A target layer's identity columns and a restored head's fc compute what they did before."""
    started = create(llama(), Eagle3Config(init_layer=-1)).eval()
    width, hidden = started.inputs * started.hidden_size, started.hidden_size
    states = torch.randn(500, width) * (torch.rand(width) * 30 + 0.01)
    only_last = states.clone()
    only_last[:, :-hidden] = 0
    before = started.combine(only_last)
    started.calibrate(states)
    torch.testing.assert_close(started.combine(only_last), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(before, states[:, -hidden:])

    restored = create(llama(), Eagle3Config()).eval()
    restored.fc_learnt = 0
    before = restored.combine(states)
    restored.calibrate(states)
    torch.testing.assert_close(restored.combine(states), before, rtol=1e-4, atol=1e-4)


def test_noise_is_for_training_only_and_follows_the_seed() -> None:
    head = create(llama(), Eagle3Config(feature_noise=0.3))
    batch = batch_for(head, torch.randn(20, head.inputs * head.hidden_size))
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(head.train()(batch).loss)
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
    assert torch.equal(head.eval()(batch).loss, head(batch).loss)


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32() -> None:
    head = create(llama(), Eagle3Config(feature_noise=0.0))
    batch = batch_for(head, torch.randn(60, head.inputs * head.hidden_size))
    full = head(batch)
    with torch.autocast("cpu", torch.bfloat16):
        half = head(batch)
    assert half.loss.dtype == torch.float32
    assert not torch.equal(half.loss, full.loss)
    # bfloat16 keeps 8 bits: each logit is off by up to about 1 %, the mean over 58 rows by much less.
    torch.testing.assert_close(half.loss, full.loss, rtol=1e-2, atol=1e-2)
    half.mean().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in head.parameters() if p.requires_grad
    )


def test_a_bfloat16_head_trains_and_drafts() -> None:
    head = create(llama(), Eagle3Config(layers=2, train_lm_head=True)).to(torch.bfloat16)
    batch = batch_for(head, torch.randn(30, head.inputs * head.hidden_size, dtype=torch.float16))
    sums = head(batch)
    sums.mean().backward()
    assert bool(sums.loss.isfinite().all())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())
    hidden = head.extend(head.new_cache(30), batch.states, batch.token_ids, 0)
    assert hidden.dtype == torch.bfloat16
