"""Heads that an engine cannot load, or loads in part: tensors, their names and the values it builds by."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from capture_hooks.interop.explain import ExplainOptions, agrees, explain_head

LLAMA = ExplainOptions(family="llama", layers=12, written_for="specforge")
BOTH = {"sglang", "vllm"}
ENGINES = sorted(BOTH)
NORMS = {"fc_norm": True, "norm_before_fc": True}
#: A draft of two layers with every norm: each tensor of it is needed by one engine or both.
SECOND = {
    **{f"layers.1.self_attn.{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"},
    **{f"layers.1.mlp.{name}_proj.weight": torch.ones(12, 8) for name in ("gate", "up")},
    "layers.1.mlp.down_proj.weight": torch.ones(8, 12),
    **{
        f"layers.1.{name}.weight": torch.ones(8)
        for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    },
    **{f"fc_norm.{index}.weight": torch.ones(8) for index in range(3)},
    "input_norm.weight": torch.ones(24),
}
ONLY = {"layers.1.hidden_norm.weight": {"sglang"}, "layers.1.input_layernorm.weight": {"vllm"}}
MANY = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def head(raw_head, tmp_path):
    """Writes a head of SpecForge's that both engines serve right, changed: None removes, "null" is null."""
    written = iter(range(10**6))

    def write(*, config=(), tensors=(), rename=None, **given):
        place = Path(raw_head(nested=[1, 5, 8], name=f"head-{next(written)}", **given))
        document = json.loads((place / "config.json").read_text())
        document["eagle_aux_hidden_state_layer_ids"] = [2, 6, 9]
        for key, value in dict(config).items():
            document[key] = None if value == "null" else value
            if value is None:
                del document[key]
        (place / "config.json").write_text(json.dumps(document))
        held = {**load_file(place / "model.safetensors"), **dict(tensors)}
        held = {(rename or str)(name): value for name, value in held.items() if value is not None}
        save_file(held, place / "model.safetensors")
        return str(place)

    return write


def wrong_for(directory, asked=LLAMA):
    """The engines that cannot agree, and what is wrong for each of them."""
    report = explain_head(directory, asked)
    refused = {engine for engine in BOTH if not agrees(report, [engine])}
    checks = {}
    for finding in report.findings:
        if finding.severity == "wrong":
            checks.setdefault(finding.check, set()).update(finding.engines)
    return refused, checks


def two_layers(head, **tensors):
    return head(config={"num_hidden_layers": 2, **NORMS}, tensors={**SECOND, **tensors})


def test_right_heads_have_nothing_wrong(head):
    assert wrong_for(head())[0] == set()
    assert wrong_for(two_layers(head))[0] == set()


@given(st.data())
@MANY
def test_any_tensor_that_is_missing_is_found(head, data):
    place = Path(two_layers(head))
    names = sorted(load_file(place / "model.safetensors").keys() - {"t2d"})
    name = data.draw(st.sampled_from(names))
    refused, checks = wrong_for(two_layers(head, **{name: None}))
    assert refused == ONLY.get(name, BOTH), checks


@given(st.data())
@MANY
def test_any_tensor_of_another_shape_is_found(head, data):
    held = load_file(Path(two_layers(head)) / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(held.keys() - {"t2d", "d2t"})))
    shape = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3).map(tuple))
    if shape == tuple(held[name].shape):
        return
    refused, checks = wrong_for(two_layers(head, **{name: torch.ones(shape)}))
    assert refused >= ONLY.get(name, BOTH), checks


@given(st.sampled_from(ENGINES), st.integers(2, 10**9))
@MANY
def test_layers_that_the_config_counts_and_nobody_stored(head, engine, layers):
    refused, checks = wrong_for(head(config={"num_hidden_layers": layers}))
    assert engine in refused
    assert engine in checks["tensors.missing"]


def test_a_quantised_heads_matrices_have_their_writers_shapes(head):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    packed = {
        "midlayer.mlp.up_proj.weight": torch.ones(12, 4),
        "midlayer.mlp.up_proj.weight_scale": torch.ones(1),
    }
    assert wrong_for(head(config=quantised, tensors=packed))[0] == set()
    assert wrong_for(head(config=quantised, tensors={"norm.weight": torch.ones(7)}))[0] == BOTH


@pytest.mark.parametrize(
    ("rename", "refused"),
    [
        (lambda name: name if name == "lm_head.weight" else f"model.{name}", {"vllm"}),
        (lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}", {"vllm"}),
        (lambda name: f"model.{name}", BOTH),
        (lambda name: f"model.{name}" if name == "t2d" else name, set()),
        (lambda name: name.replace("midlayer.", "layers.0."), set()),
    ],
)
def test_names_in_another_spelling(head, rename, refused):
    assert wrong_for(head(rename=rename))[0] == refused


def test_legacy_names_of_the_per_input_norms(head):
    norms = {f"aux_norm_{name}.weight": torch.ones(8) for name in ("low", "mid", "high")}
    refused, checks = wrong_for(head(config={"fc_norm": True}, tensors=norms))
    assert (refused, checks["tensors.spelling"]) == ({"vllm"}, {"vllm"})


def test_layers_that_are_stored_and_not_counted(head):
    refused, checks = wrong_for(head(config=NORMS, tensors=SECOND))
    assert refused == checks["tensors.unbuilt"] == BOTH


@pytest.mark.parametrize("extra", ["midlayer.self_attn.q_norm.weight", "verifier_norm.weight", "gate.weight"])
def test_tensors_that_a_class_does_not_have(head, extra):
    refused, checks = wrong_for(head(tensors={extra: torch.ones(8)}))
    assert (refused, checks["tensors.unknown"]) == ({"vllm"}, {"vllm"})


def test_what_every_engine_computes_itself_may_be_stored(head):
    assert wrong_for(head(tensors={"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)}))[0] == set()


WHOLE = {"d2t": None, "t2d": None, "lm_head.weight": torch.ones(40, 8)}


@pytest.mark.parametrize(
    ("size", "tensors", "refused"),
    [
        (None, {}, {"sglang"}),
        ("null", {}, {"sglang"}),
        (40, {}, set()),
        ("null", {"lm_head.weight": None}, set()),
        (None, {"lm_head.weight": None}, {"sglang"}),
        (40, {"lm_head.weight": None}, {"sglang"}),
    ],
)
def test_the_draft_vocabularys_size_and_whose_lm_head_it_gets(head, size, tensors, refused):
    assert wrong_for(head(config={"draft_vocab_size": size}, tensors=WHOLE | tensors))[0] == refused


def test_a_draft_vocabulary_without_its_lm_head(head):
    """vLLM shares the target's rows, of which the first would be taken for the draft's tokens."""
    assert wrong_for(head(tensors={"lm_head.weight": None}))[0] == BOTH


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_hidden_size", "null"),
        ("hidden_act", "gelu"),
        ("hidden_act", "null"),
        ("intermediate_size", None),
        *[(key, "null") for key in ("hidden_size", "num_hidden_layers", "rms_norm_eps", "mlp_bias")],
        ("num_attention_heads", 3),
        ("architectures", "LlamaForCausalLMEagle3"),
        ("architectures", "null"),
    ],
)
def test_configs_that_no_engine_builds(head, key, value):
    assert wrong_for(head(config={key: value}))[0] == BOTH


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "num_aux_hidden_states", "norm_output"])
def test_nulls_that_every_engine_takes_for_left_out(head, key):
    assert wrong_for(head(config={key: "null"}))[0] == set()


@pytest.mark.parametrize(
    ("nested", "top", "refused"),
    [
        ("null", True, BOTH),
        ("null", False, set()),
        (None, True, set()),
        (True, "null", set()),
        (None, "null", set()),
    ],
)
def test_a_null_flag_is_false_where_its_key_is_looked_up_first(head, nested, top, refused):
    """Both servers read ``eagle_config.get("norm_before_fc", top)``: a null hides the other key."""
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
    if nested is not None:
        eagle["norm_before_fc"] = None if nested == "null" else nested
    norm = {"input_norm.weight": torch.ones(24)} if True in (nested, top) else {}
    place = head(config={"norm_before_fc": top, "eagle_config": eagle}, tensors=norm)
    assert wrong_for(place)[0] == refused


def test_a_null_use_aux_hidden_state_is_false_to_vllm(head):
    eagle = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": None}
    assert "vllm" in wrong_for(head(config={"eagle_config": eagle}))[0]


def test_the_mla_class_of_sglang_takes_nulls_that_its_llama_class_does_not(head):
    changed = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "draft_vocab_size": None}
    checks = wrong_for(head(config=changed | {"target_hidden_size": "null"}))[1]
    assert checks["config.null"] == {"vllm"}
    assert "config.draft_vocab_size" not in checks
