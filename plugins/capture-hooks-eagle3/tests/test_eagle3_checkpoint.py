"""Export and restore: names, permutation, folding, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from capture_hooks_eagle3 import Eagle3Config, Eagle3Head
from capture_hooks_eagle3.provider import Eagle3Provider
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.errors import HeadError
from capture_hooks.heads.contract import TargetReadout, TrainBatch
from capture_hooks.spec import CaptureSpec

HIDDEN, VOCABULARY, LAYERS = 8, 13, 6
IDS = torch.tensor([0, 2, 3, 7, 11])
CONFIG = Eagle3Config(
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate_size=12,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=64,
    lm_head_init="random",
    steps=3,
)


class Target(nn.Module):
    """The parts an anatomy names, without a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)


def target() -> tuple[Anatomy, TargetReadout]:
    torch.manual_seed(1)
    model = Target()
    anatomy = Anatomy(
        model=model,
        decoder=model,
        decoder_name="",
        layers=tuple(model.layers),
        layer_names=tuple(f"layers.{i}" for i in range(LAYERS)),
        embedding=model.embed,
        final_norm=model.norm,
        final_norm_name="norm",
        lm_head=model.lm_head,
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
    )
    return anatomy, TargetReadout(model.lm_head.weight)


def make(config: Eagle3Config, inputs: int = 3) -> Eagle3Head:
    anatomy, readout = target()
    spec = CaptureSpec.parse(", ".join(f"post.{i}" for i in range(inputs)))
    head = Eagle3Head(config, spec, LAYERS, anatomy.embedding.weight, readout, IDS).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head


def batch(inputs: int = 3) -> TrainBatch:
    torch.manual_seed(2)
    return TrainBatch(
        states=torch.randn(20, inputs * HIDDEN),
        target=torch.randn(20, HIDDEN),
        token_ids=torch.randint(VOCABULARY, (20,)),
        loss_mask=torch.rand(20) < 0.8,
        starts=torch.tensor([0, 11, 20]),
    )


def restored(head: Eagle3Head, order: tuple[int, ...], change: Callable[[dict, dict], None] | None = None):
    tensors, fields = head.export(order)
    if change is not None:
        change(tensors, fields)
    anatomy, readout = target()
    return Eagle3Provider().restore(tensors, fields, head.spec, order, anatomy, readout).eval()


NORMS = st.sampled_from(["", "norm_before_fc", "fc_norm"])
VARIANTS = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 3),
        "norm_before_residual": st.booleans(),
        "norm_output": st.booleans(),
        "train_lm_head": st.booleans(),
        "train_embedding": st.booleans(),
    }
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    variant=VARIANTS,
    order=st.permutations([0, 1, 2]),
    norm=NORMS,
)
def test_a_restored_head_computes_the_same(variant: dict, order: list[int], norm: str) -> None:
    config = replace(CONFIG, **variant, **({norm: True} if norm else {}))
    head = make(config)
    head.calibrate(batch().states * torch.rand(3 * HIDDEN) * 50)
    again = restored(head, tuple(order))
    assert again.config == head.config
    assert again.spec == head.spec
    torch.testing.assert_close(again(batch()).loss, head(batch()).loss, rtol=1e-5, atol=1e-4)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(order=st.permutations([0, 1, 2]), norm=NORMS)
def test_the_file_is_the_head_of_the_permuted_states(order: list[int], norm: str) -> None:
    """A reader that knows nothing of our order feeds input order[i] as input i and gets the same states."""
    head = make(replace(CONFIG, **({norm: True} if norm else {})))
    head.calibrate(batch().states * 7)
    tensors, _ = head.export(order)
    states = batch().states
    fed = torch.cat([states[:, i * HIDDEN : (i + 1) * HIDDEN] for i in order], -1)

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    if norm == "norm_before_fc":
        fed = rms(fed, tensors["input_norm.weight"])
    elif norm == "fc_norm":
        chunks = fed.chunk(3, -1)
        fed = torch.cat([rms(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(chunks)], -1)
    torch.testing.assert_close(fed @ tensors["fc.weight"].T, head.combine(states), rtol=1e-4, atol=1e-5)


def test_names_shapes_and_vocabulary_maps() -> None:
    head = make(replace(CONFIG, layers=2))
    tensors, fields = head.export((2, 0, 1))
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    parts += ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layers = {f"{layer}.{part}.weight" for layer in ("midlayer", "layers.1") for part in parts}
    assert set(tensors) == layers | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 2 * HIDDEN)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (16, HIDDEN)
    # One norm under SGLang's and vLLM's names.
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert tensors["d2t"].tolist() == [0, 1, 1, 4, 7]
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == IDS.tolist()
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["draft_vocab_size"] == len(IDS)
    assert fields["tie_word_embeddings"] is False


def test_exported_tensors_are_copies() -> None:
    head = make(CONFIG)
    for tensor in head.export((0, 1, 2))[0].values():
        tensor.zero_()
    assert all(bool(p.any()) for p in head.parameters())


def test_a_one_input_head_exports_the_identity() -> None:
    head = make(CONFIG, inputs=1)
    tensors, _ = head.export((0,))
    assert torch.equal(tensors["fc.weight"], torch.eye(HIDDEN))
    again = restored(head, (0,))
    torch.testing.assert_close(again(batch(1)).loss, head(batch(1)).loss)
    with pytest.raises(HeadError, match="has no fc"):
        make(replace(CONFIG, fc_norm=True), inputs=1)
    with pytest.raises(HeadError, match="not the identity"):
        restored(head, (0,), lambda tensors, _: tensors["fc.weight"].mul_(2))


def test_a_trained_embedding_travels_with_the_head() -> None:
    head = make(replace(CONFIG, train_embedding=True))
    assert torch.equal(head.export((0, 1, 2))[0]["embed_tokens.weight"], head.embedding)
    frozen = make(CONFIG)
    assert "embed_tokens.weight" not in frozen.export((0, 1, 2))[0]
    assert "embedding" not in frozen.state_dict()

    def add_own(tensors: dict, fields: dict) -> None:
        tensors["embed_tokens.weight"] = frozen.embedding + 1

    assert torch.equal(restored(frozen, (0, 1, 2), add_own).embedding, frozen.embedding + 1)


def drop(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, _: tensors.pop(name)


def shrink(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, _: tensors.update({name: tensors[name][:-1]})


def add(name: str) -> Callable[[dict, dict], None]:
    return lambda tensors, _: tensors.update({name: torch.zeros(1)})


def field(name: str, value: object) -> Callable[[dict, dict], None]:
    return lambda _, fields: fields.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("midlayer.hidden_norm.weight"), r"missing: midlayer\.hidden_norm\.weight"),
        (drop("fc.weight"), r"missing: fc\.weight"),
        (add("midlayer.extra.weight"), r"unexpected: midlayer\.extra\.weight"),
        (shrink("norm.weight"), r"norm\.weight is \[7\] in the file; config.json asks for \[8\]"),
        (drop("d2t"), "no d2t, and draft_vocab_size 5 differs from vocab_size 13"),
        (shrink("d2t"), "asks for \\[5\\]"),
        (lambda t, _: t["t2d"].logical_not_(), r"t2d marks 8 ids .* and d2t names 5 ids"),
        (
            lambda t, _: (t.pop("t2d"), t["d2t"].fill_(20)),
            r"target ids 20\.\.24, outside a vocabulary of 13",
        ),
        (field("fc_norm", True), r"missing: fc_norm\.0\.weight"),
        (field("hidden_size", 16), "hidden_size = 16; the target's is 8"),
        (field("num_hidden_layers", None), "num_hidden_layers = None"),
        (field("attention_bias", True), "attention_bias = True"),
        (field("hidden_act", "gelu"), "hidden_act = 'gelu'"),
        (field("eagle3_training", {"stepz": 3}), r"unknown settings \['stepz'\]"),
        (field("rope_parameters", {"rope_type": "spiral", "rope_theta": 1.0}), "'spiral'.*unknown"),
        (
            lambda t, _: t["layers.1.hidden_norm.weight"].add_(1),
            r"layers\.1\.input_layernorm\.weight and layers\.1\.hidden_norm\.weight differ",
        ),
    ],
)
def test_what_is_refused_is_named(change: Callable[[dict, dict], None], message: str) -> None:
    head = make(replace(CONFIG, layers=2))
    with pytest.raises(HeadError, match=message):
        restored(head, (1, 2, 0), change)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (1, 2, 3)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(HeadError, match="no permutation"):
        make(CONFIG).export(order)


def test_layers_0_is_read_as_midlayer() -> None:
    head = make(CONFIG)

    def rename(tensors: dict, _: dict) -> None:
        for name in [n for n in tensors if n.startswith("midlayer.")]:
            tensors["layers.0." + name.removeprefix("midlayer.")] = tensors.pop(name)

    torch.testing.assert_close(restored(head, (0, 1, 2), rename)(batch()).loss, head(batch()).loss)
