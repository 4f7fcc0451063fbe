"""What a conversion cannot keep, cannot know or must not guess."""

import dataclasses
import itertools
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from capture_hooks.capture import find_anatomy
from capture_hooks.errors import ConventionError, HeadError, SpecError
from capture_hooks.heads import load_head, save_head
from capture_hooks.interop.heads import FORMATS, TargetShape, convert_head, open_head
from capture_hooks.interop.heads.settle import settle
from capture_hooks.spec import CaptureSpec

SPEC = CaptureSpec.parse("post.1, post.3, post.5")
KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def about(target):
    return TargetShape.of_anatomy(find_anatomy(target))


@pytest.fixture
def source(target, about, witness_of, make_head, tmp_path):
    """A head in a layout, its config and tensors changed."""

    def source(layout="eagle", change=lambda config: None, tensors=None, **settings):
        head, place = make_head(target, SPEC, **settings), tmp_path / layout
        save_head(head, tmp_path / "own", model=target, witness=witness_of(target, SPEC), overwrite=True)
        convert_head(tmp_path / "own", place, to=layout, target=about, overwrite=True)
        config = json.loads((place / "config.json").read_text())
        change(config)
        (place / "config.json").write_text(json.dumps(config))
        found = load_file(place / "model.safetensors")
        save_file({**found, **(tensors or {})}, place / "model.safetensors")
        return place

    return source


@pytest.fixture
def go(about, tmp_path):
    def go(place, to="speculators", **options):
        options = {"target": about, "written_for": "sglang", **options}
        return convert_head(place, tmp_path / "out", to=to, **options)

    return go


def refused(go, words, place, **options):
    """Refused by name; nothing is written, and ``--force`` writes it with the losses in the file."""
    with pytest.raises(HeadError, match=words) as caught:
        go(place, **options)
    assert "--force writes it all the same" in str(caught.value)
    done = go(place, force=True, **options)
    recorded = json.loads((done.destination / "config.json").read_text())["capture_hooks_conversion"]
    assert recorded["losses"] == list(done.losses) != []
    assert recorded["from"] == done.layout_from
    return done


def test_specforges_flag_without_a_norm(source, go, target, tmp_path):
    place = source(change=lambda c: (c.update(norm_output=False), c["eagle_config"].pop("norm_output")))
    for to in ("speculators", "modelopt"):
        refused(
            go, "lm_head reads the output without norm", place, to=to, written_for="specforge", overwrite=True
        )
    with pytest.raises(HeadError, match=r"to SpecForge it means norm before lm_head"):
        go(place, written_for=None, spec=SPEC)
    kept = go(place, to="eagle", written_for="specforge", overwrite=True)
    assert json.loads((kept.destination / "config.json").read_text())["norm_output"] is False
    plain = go(place, to="eagle", written_for="sglang", overwrite=True)
    assert "norm_output" not in json.loads((plain.destination / "config.json").read_text())


def test_a_window_as_long_as_every_sequence_limits_nothing(source, go, target):
    def limited(config):
        inner = config["transformer_layer_config"]
        wide = inner["max_position_embeddings"]
        inner |= {"layer_types": ["sliding_attention"], "sliding_window": wide}

    place = source("speculators", limited)
    assert not any("attends" in note for note in go(place, to="eagle", written_for=None).notes)
    go(place, to="capture-hooks", model=target, written_for=None, overwrite=True)


def test_a_sliding_window_reaches_who_honours_it(source, go, target):
    def limited(config):
        config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 64}

    place = source("speculators", limited)
    done = go(place, to="eagle", written_for=None)
    assert any("attends to the last 64 tokens: vLLM does so" in note for note in done.notes)
    assert json.loads((done.destination / "config.json").read_text())["sliding_window"] == 64
    refused(
        go, "this one to the last 64 tokens", place, to="capture-hooks", model=target, written_for=None,
        overwrite=True,
    )  # fmt: skip
    with pytest.raises(HeadError, match="cannot be used as it is: its draft attends to everything"):
        load_head(place, target, formats=FORMATS)


def scaled(**settings):
    """RoPE settings in the place of the default ones; transformers' spelling."""

    def change(config):
        rope = {
            **config["rope_parameters"],
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            **settings,
        }
        config["rope_parameters"] = rope
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partial_rotary_factor": 0.5}, r"SGLang and vLLM turn that part of each attention head's channels"),
        ({"rotary_pct": 0.25}, "vLLM turns that part"),
        ({"rotary_emb_fraction": 0.25}, "vLLM turns that part"),
        ({"rotary_emb_base": 5e5}, r"and rope_theta 10000\.0: vLLM takes either"),
        ({"rope_is_neox_style": False}, "SGLang turns neighbouring channels together"),
        ({"bias": True}, "give the attention's projections biases"),
        ({"is_causal": False}, "vLLM attends to later tokens too"),
        ({"logit_scale": 0.5}, "vLLM multiplies the logits by it"),
        ({"quantization_config": {"quant_method": "fp8"}}, "take the weights for quantised ones"),
        (scaled(partial_rotary_factor=0.5), r"rope_parameters\.partial_rotary_factor is 0\.5"),
        (scaled(rope_dim=4), "vLLM turns so many"),
        (scaled(use_fope=True), "vLLM takes Fourier"),
        (scaled(rope_type="yarn", attn_factor=2.0), "SGLang multiplies cosines and sines"),
        (scaled(rope_type="yarn", extrapolation_factor=2.0), "SGLang scales the ramp"),
    ],
)
def test_what_servers_compute_and_our_head_does_not(source, go, target, change, words):
    place = source(change=change if callable(change) else lambda config: config.update(change))
    done = go(place, to="eagle")
    assert any(re.search(words, note) for note in done.notes)
    assert done.losses == ()
    refused(go, words, place, to="capture-hooks", model=target, overwrite=True)
    with pytest.raises(HeadError, match=f"cannot be used as it is: .*{words}"):
        load_head(place, target, formats=FORMATS, written_for="sglang")


def test_rope_settings_that_our_head_computes(source, go, target):
    """Values that change nothing are no loss, nor is YaRN; types that each reader computes by itself are."""
    quiet = {"partial_rotary_factor": 1.0, "rope_is_neox_style": True, "bias": None, "logit_scale": 1}
    assert go(source(change=lambda c: c.update(quiet)), to="capture-hooks", model=target).losses == ()
    place = source(change=scaled(rope_type="yarn"))
    assert go(place, to="capture-hooks", model=target, overwrite=True).losses == ()
    for kind in ("dynamic", "longrope", "proportional"):
        with pytest.raises(HeadError, match=f"rope_type is '{kind}': which frequencies that is"):
            go(source(change=scaled(rope_type=kind)), to="capture-hooks", model=target, overwrite=True)

    def outer(config):
        scaled(rope_type="yarn")(config)
        config["original_max_position_embeddings"] = 32

    with pytest.raises(HeadError, match="is 32, and 64 in the RoPE settings: SGLang scales by the former"):
        go(source(change=outer), to="capture-hooks", model=target, overwrite=True)


def test_an_activation_that_no_server_has(source, go, target):
    place = source(change=lambda c: c.update(hidden_act="gelu"))
    assert any("refuse a draft with anything but silu" in note for note in go(place, to="modelopt").notes)
    with pytest.raises(HeadError, match="hidden_act = 'gelu'"):
        go(place, to="capture-hooks", model=target, overwrite=True)


@pytest.mark.parametrize("to", ["eagle", "modelopt", "speculators", "capture-hooks"])
def test_a_tensor_that_no_reader_has_a_place_for(source, go, target, to):
    stray = "layers.7.mlp.up_proj.weight"
    place = source(tensors={"weird": torch.ones(3), stray: torch.ones(3, 3)})
    options = {"to": to, "model": target if to == "capture-hooks" else None}
    words = rf"{stray} is of layer 7, and its config has 1 \(num_hidden_layers\)"
    done = refused(go, words, place, **options)
    assert any("the tensor weird has no place in it" in loss for loss in done.losses)
    assert not {"weird", stray} & load_file(done.destination / "model.safetensors").keys()


def test_scales_of_quantised_weights_go_where_servers_read_them(source, go):
    scale = "midlayer.mlp.up_proj.weight_scale"
    place = source(tensors={scale: torch.ones(1)}, change=lambda c: c.update(quantization_config={"a": 1}))
    done = go(place, to="modelopt")
    assert "layers.0.mlp.up_proj.weight_scale" in load_file(done.destination / "model.safetensors")
    refused(go, f"the tensor {scale} has no place", place, overwrite=True)
    refused(
        go,
        f"the tensor {scale} has no place",
        source(tensors={scale: torch.ones(1)}),
        to="eagle",
        overwrite=True,
    )


def test_a_tensor_of_another_kind_of_head(source, go):
    place = source(tensors={"mask_hidden": torch.ones(1, 96)})
    done = refused(go, "the tensor mask_hidden has no place in it", place)
    assert "mask_hidden" not in load_file(done.destination / "model.safetensors")
    done = go(place, to="modelopt", overwrite=True)
    assert "mask_hidden" in load_file(done.destination / "model.safetensors")


def test_losses_travel_with_the_file(source, go, about, tmp_path):
    place = source(tensors={"mask_hidden": torch.ones(1, 96)})
    go(place, force=True)
    with pytest.raises(HeadError, match="the tensor mask_hidden has no place in it"):
        convert_head(tmp_path / "out", tmp_path / "again", to="eagle", target=about)
    assert not (tmp_path / "again").exists()


def test_ids_of_another_key_that_disagree(source, go):
    def shifted(config):
        config["eagle_aux_hidden_state_layer_ids"] = config["eagle_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]

    place = source(change=shifted)
    done = refused(go, r"= \[1, 3, 5\] means pre\.1, pre\.3, pre\.5 to vllm, and not post\.1", place)
    assert done.spec == SPEC
    refused(go, r"means pre\.1, pre\.3, pre\.5 to vllm", place, written_for=None, spec=SPEC, overwrite=True)


@pytest.mark.parametrize("written_for", [None, "sglang"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_spec_says_the_order_of_ids_that_do_not_ascend(source, go, target, order, written_for):
    """The same head, its columns in any order: ids that name the same states are no contradiction."""
    ascending = source()
    wanted = load_file(ascending / "model.safetensors")

    def shuffled(config):
        for place in (config["eagle_config"], config):
            place[KEY] = [place[KEY][index] for index in order]

    columns = torch.cat([wanted["fc.weight"][:, 32 * i : 32 * i + 32] for i in order], 1)
    place = source(change=shuffled, tensors={"fc.weight": columns.contiguous()})
    spec = CaptureSpec(tuple(SPEC.inputs[index] for index in order))
    done = go(place, to="eagle", written_for=written_for, spec=spec)
    assert done.losses == ()
    assert len([note for note in done.notes if "in another order" in note]) == (
        0 if order == (0, 1, 2) else 2
    )
    assert torch.equal(load_file(done.destination / "model.safetensors")["fc.weight"], wanted["fc.weight"])
    assert open_head(done.destination).ids == {KEY: [2, 4, 6], f"eagle_config.{KEY}": [1, 3, 5]}


def test_the_spec_may_order_ids_that_ascend_but_not_name_other_states(source, go):
    place = source()
    spec = CaptureSpec.parse("post.5, post.1, pre.4")
    assert go(place, written_for=None, spec=spec).losses == ()
    refused(
        go, "means post.1, post.3, post.5 to sglang", place, written_for=None, overwrite=True,
        spec=CaptureSpec.parse("post.5, post.1, post.2"),
    )  # fmt: skip
    place = source(change=lambda c: (c["eagle_config"].update({KEY: [5, 1, 3]}), c.pop(KEY)))
    with pytest.raises(
        HeadError, match=r"mean post\.1, post\.3, post\.5, and the spec given is post\.5, post"
    ):
        go(place, spec=CaptureSpec.parse("post.5, post.1, post.2"), overwrite=True)


def test_ids_that_cannot_be_written(source, go, about):
    """SGLang's Llama never captures the embedding; vLLM and speculators do."""
    first = CaptureSpec.parse("embed, post.3, post.5")
    place = source(change=lambda c: (c["eagle_config"].pop(KEY), c.pop(KEY)))
    done = refused(go, "layer_ids cannot be written", place, to="eagle", spec=first, written_for=None)
    config = json.loads((done.destination / "config.json").read_text())
    assert config[KEY] == [0, 4, 6]
    assert "cannot serve this head" in next(iter(config["eagle_config"][KEY]))
    assert go(place, spec=first, written_for=None, overwrite=True).losses == ()


@pytest.mark.parametrize(
    "ids", [[1, 3, 3], [5, 3, 1], ["1", "3", "5"], [1, 3, 99], [], "1, 3, 5", {"1": 1}, [1, 3]]
)
def test_ids_that_mean_nothing(source, go, tmp_path, ids):
    place = source(change=lambda c: (c["eagle_config"].update({KEY: ids}), c.pop(KEY)))
    with pytest.raises((ConventionError, HeadError)):
        go(place)
    assert not (tmp_path / "out").exists()


def test_no_ids_and_a_library_that_has_a_default(source, go):
    place = source("speculators", lambda c: c.update({KEY: None}))
    with pytest.raises(HeadError, match=r"lists no layer ids\. speculators itself would take its default"):
        go(place, to="eagle", written_for=None)
    # Its default is pre.2, pre.4, pre.5 in 8 layers: post.1, post.3, post.4.
    done = go(place, to="eagle", written_for="speculators")
    assert [p.resolve(8).boundary for p in done.spec.inputs] == [2, 4, 5]
    assert any("default was taken" in note for note in done.notes)


def test_two_inputs_that_are_one_state(source, go):
    place = source(change=lambda c: (c["eagle_config"].pop(KEY), c.pop(KEY)))
    with pytest.raises(SpecError, match=r"post\.1 and pre\.2 are the same state"):
        go(place, written_for=None, spec=CaptureSpec.parse("post.1, pre.2, post.5"))


def test_a_convention_that_was_only_read(source, go):
    place = source(change=lambda c: c.pop(KEY))
    with pytest.raises(ConventionError, match="never compared with its running code"):
        go(place, written_for="torchspec")
    done = go(place, written_for="torchspec", accept_unverified=True)
    assert done.spec == SPEC


def test_maps_in_other_forms(source, go, about):
    ids = torch.tensor([3, 40, 41, 200])

    def four(config):
        config["draft_vocab_size"] = 4

    everything = torch.ones(about.vocab_size, dtype=torch.bool)
    marked = torch.zeros_like(everything).index_fill_(0, ids, True)
    offsets, zeros = ids - torch.arange(4), torch.zeros(4, dtype=torch.int64)

    def mapped(d2t, t2d):
        return source(change=four, tensors={"d2t": d2t, "t2d": t2d, "lm_head.weight": torch.randn(4, 32)})

    for d2t, notes in ((ids, 1), (offsets, 0), (offsets.int(), 0)):
        done = go(mapped(d2t, marked), overwrite=True)
        assert torch.equal(load_file(done.destination / "model.safetensors")["d2t"], offsets)
        assert sum("held absolute ids" in note for note in done.notes) == notes
    refused(go, "the draft vocabulary was never written", mapped(zeros, everything), overwrite=True)
    assert go(mapped(zeros, torch.arange(about.vocab_size) < 4), overwrite=True).losses == ()
    with pytest.raises(HeadError, match="ascending"):
        go(mapped(ids.flip(0), marked), overwrite=True)


def test_biases_go_where_they_are_computed(source, go, target):
    def biased(config):
        config["mlp_bias"] = True

    place = source(change=biased)
    inner = open_head(place).tensors["midlayer.mlp.up_proj.weight"].shape[0]
    wide = {"up_proj": inner, "gate_proj": inner, "down_proj": 32}
    with pytest.raises(HeadError, match=r"lacks midlayer\.mlp\.down_proj\.bias"):
        go(place)
    place = source(change=biased, tensors={f"midlayer.mlp.{n}.bias": torch.ones(w) for n, w in wide.items()})
    done = go(place)
    assert "layers.0.mlp.up_proj.bias" in load_file(done.destination / "model.safetensors")
    with pytest.raises(HeadError, match="mlp_bias = True; only False is supported"):
        go(place, to="capture-hooks", model=target, overwrite=True)
    place = source(tensors={f"midlayer.mlp.{n}.bias": torch.ones(w) for n, w in wide.items()})
    with pytest.raises(HeadError, match="its config does not say mlp_bias"):
        go(place, overwrite=True)


def test_one_byte_floats_move_and_are_not_computed_with(source, go, target, about):
    place = source(change=lambda c: (c["eagle_config"].pop(KEY), c.pop(KEY)))
    wide = load_file(place / "model.safetensors")
    small = {n: t.to(torch.float8_e4m3fn) for n, t in wide.items() if n.startswith("fc")}
    save_file({**wide, **small}, place / "model.safetensors")
    shuffled = CaptureSpec.parse("post.5, post.1, post.3")
    done = go(place, to="modelopt", written_for=None, spec=shuffled)
    assert done.moved
    found = load_file(done.destination / "model.safetensors")["fc.weight"].view(torch.uint8)
    whole = small["fc.weight"].view(torch.uint8)
    assert torch.equal(found, torch.cat([whole[:, 32:64], whole[:, 64:], whole[:, :32]], 1))
    with pytest.raises(HeadError, match=r"fc\.weight is float8_e4m3fn, in which nothing can be computed"):
        go(place, to="capture-hooks", model=target, written_for=None, spec=shuffled, overwrite=True)


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        ("eagle", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "a Llama-type EAGLE-3 draft"),
        ("eagle", {"architectures": None}, "architectures is None"),
        ("eagle", {"vocab_size": 7}, "vocab_size is 7, and the target's is"),
        ("eagle", {"rms_norm_eps": None}, "gives no rms_norm_eps"),
        ("eagle", {"hidden_size": "32"}, "contradicts itself: hidden_size is '32'"),
        ("eagle", {"hidden_size": 16}, "and its config asks for"),
        ("eagle", {"fc_norm": True}, r"lacks fc_norm\.0\.weight"),
        ("eagle", {"rope_theta": 1.0}, "in two places of its config"),
        ("eagle", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "would turn the head differently"),
        ("eagle", {"use_aux_hidden_state": False}, "is true and use_aux_hidden_state is false"),
        ("eagle", {"eagle_config": {"use_aux_hidden_state": False}}, "eats the target's final state alone"),
        ("modelopt", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
        ("speculators", {"speculators_model_type": "peagle"}, "only eagle3 can be converted"),
        ("speculators", {"norm_before_residual": None}, "speculators takes false and vLLM true"),
    ],
)
def test_heads_that_say_too_little_or_too_much(source, go, tmp_path, layout, change, words):
    place = source(layout, lambda config: config.update(change))
    with pytest.raises(HeadError, match=words):
        go(
            place,
            to="modelopt" if layout == "eagle" else "eagle",
            written_for={"eagle": "sglang", "modelopt": "modelopt", "speculators": None}[layout],
            force=True,
        )
    assert not (tmp_path / "out").exists()


def test_two_norms_of_a_further_layer_that_differ(source, go):
    place = source(layers=2)
    name = "layers.1.hidden_norm.weight"
    tensors = load_file(place / "model.safetensors")
    save_file({**tensors, name: tensors[name] + 1}, place / "model.safetensors")
    with pytest.raises(HeadError, match="vLLM and speculators norm with the first, SGLang and"):
        go(place)
    del tensors["layers.1.input_layernorm.weight"]
    save_file(tensors, place / "model.safetensors")
    done = go(place)
    assert any("stood alone" in note for note in done.notes)
    found = load_file(done.destination / "model.safetensors")
    assert torch.equal(found["layers.1.input_layernorm.weight"], tensors[name])


def test_keys_are_mapped_carried_or_left_out_with_a_reason(source, go, about):
    place = source(
        change=lambda c: c.update(logit_scale=0.5, transformers_version="4.0", initializer_range=0.1)
    )
    done = go(place)
    config = json.loads((done.destination / "config.json").read_text())
    assert config["transformer_layer_config"]["logit_scale"] == 0.5
    assert done.left_out["transformers_version"] == "bookkeeping of transformers"
    known = settle(open_head(place), about, "sglang")
    again = settle(open_head(done.destination), about)
    assert dataclasses.replace(again, tensors={}).extras == dataclasses.replace(known, tensors={}).extras


def test_a_head_of_one_input_whose_fc_is_not_the_identity(target, about, make_head, witness_of, go, tmp_path):
    spec = CaptureSpec.parse("post.3")
    save_head(make_head(target, spec), tmp_path / "one", model=target, witness=witness_of(target, spec))
    convert_head(tmp_path / "one", tmp_path / "modelopt", to="modelopt", target=about)
    tensors = load_file(tmp_path / "modelopt" / "model.safetensors")
    save_file({**tensors, "fc.weight": torch.randn(32, 32)}, tmp_path / "modelopt" / "model.safetensors")
    done = go(tmp_path / "modelopt", to="eagle", written_for="modelopt")
    assert any("sglang" in note and "skips fc" in note for note in done.notes)
    with pytest.raises(HeadError, match="a head of one input has no fc here"):
        go(tmp_path / "modelopt", to="capture-hooks", model=target, written_for="modelopt", overwrite=True)


def test_a_family_that_sglang_reads_by_another_rule(source, go, about):
    """SGLang's deepseek takes ids for inputs unless the first is 1; ModelOpt's are always outputs."""
    spec = CaptureSpec.parse("post.2, post.3, post.5")
    place = source(change=lambda c: (c["eagle_config"].pop(KEY), c.pop(KEY)))
    kimi = dataclasses.replace(about, family="deepseek_v3")
    done = go(place, to="modelopt", target=kimi, spec=spec, written_for=None)
    assert any("sglang reads other states in eagle_config" in note for note in done.notes)
    config = json.loads((done.destination / "config.json").read_text())
    assert config["eagle_config"][KEY] == [2, 3, 5]
    done = go(place, to="eagle", target=kimi, spec=spec, written_for=None, overwrite=True)
    config = json.loads((done.destination / "config.json").read_text())
    assert config["eagle_config"][KEY] == [3, 4, 6]
    assert config[KEY] == [3, 4, 6]
    assert done.notes == ()


def test_the_targets_own_embedding_is_left_out_of_ours(source, go, target):
    table = find_anatomy(target).embedding.weight.detach()
    done = go(source(tensors={"embed_tokens.weight": table}), to="capture-hooks", model=target)
    assert "the target's own" in done.left_out["embed_tokens.weight"]
    assert "embed_tokens.weight" not in load_file(done.destination / "model.safetensors")
    done = go(
        source(tensors={"embed_tokens.weight": table + 1}), to="capture-hooks", model=target, overwrite=True
    )
    assert "embed_tokens.weight" in load_file(done.destination / "model.safetensors")


def test_a_head_of_ours_that_was_changed(source, go, tmp_path, about):
    source()
    path = tmp_path / "own" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, KEY: [1, 2, 3]}))
    with pytest.raises(HeadError, match=r"= \[1, 2, 3\]|is \[1, 2, 3\]"):
        go(tmp_path / "own", to="eagle", written_for=None)
    path.write_text(json.dumps(config))
    tensors = load_file(tmp_path / "own" / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1}, tmp_path / "own" / "model.safetensors")
    with pytest.raises(HeadError, match="was changed after the head was saved"):
        go(tmp_path / "own", to="eagle", written_for=None)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (torch.ones(32), None),
        (torch.full((32,), 0.7), None),
        (torch.full((32,), -0.7), r"are -0\.7"),
        (torch.zeros(32), "are 0"),
        (torch.tensor([0.5, 1.5]).repeat(16), r"vary by 50\.0% of their mean"),
        (torch.tensor([-1.0, 1.0]).repeat(16), r"vary by 100\.0% of their mean"),
    ],
)
def test_modelopts_two_norms(source, go, gain, words):
    """Said of its heads, and of heads for it: its hidden_norm undoes a first norm of one positive gain."""
    place = source("modelopt", tensors={"layers.0.input_layernorm.weight": gain})
    there = go(place, to="eagle", written_for="modelopt")
    first = there.destination.rename(there.destination.with_name("first"))
    for done in (there, go(first, to="modelopt", overwrite=True)):
        said = [note for note in done.notes if "trains with hidden_norm(input_layernorm(h))" in note]
        assert len(said) == (words is not None)
        assert all(re.search(words, note) for note in said)


def test_engines_that_would_be_wrong_are_named(source, go, tmp_path, about):
    source(norm_before_residual=True)
    done = convert_head(tmp_path / "own", tmp_path / "m", to="modelopt", target=about)
    assert any("sglang" in n and "ignores norm_before_residual" in n for n in done.notes)
    assert done.losses == ()
