"""What a head's directory says besides its ids, and what engines make of it: one fault at a time."""

import json

import pytest
import torch
from transformers import LlamaConfig

from capture_hooks.capture import find_anatomy
from capture_hooks.interop.explain import ExplainOptions, Known, explain_head
from capture_hooks.interop.explain.checks.ids import check_inputs
from capture_hooks.interop.explain.compare import state_of
from capture_hooks.interop.explain.report import Row, Verdict
from capture_hooks.interop.explain.subject import head_subject
from capture_hooks.spec import CaptureSpec, Point
from capture_hooks.testing import tiny

LLAMA = ExplainOptions(family="llama", layers=12, written_for="sglang")


def found(directory, asked=LLAMA):
    return {finding.check: finding for finding in explain_head(directory, asked).findings}


def test_a_right_head_has_nothing_wrong(raw_head):
    report = explain_head(raw_head(nested=[1, 5, 8]), LLAMA)
    assert [f.check for f in report.findings if f.severity != "note" and "modelopt" not in f.check] == []
    assert [state.point for state in report.trained.inputs] == ["post.1", "post.5", "post.8"]


FAULTS = [
    ("norms.norm_before_residual", {"config": {"norm_before_residual": True}}, "wrong", "sglang", "ignores"),
    ("norms.not_said", {"config": {"norm_before_residual": None}}, "note", None, "not said"),
    ("norms.norm_output", {"config": {"norm_output": True}}, "warning", "vllm", "two meanings"),
    ("norms.norm_output", {"config": {"norm_output": False}}, "warning", "sglang", "two meanings"),
    ("norms.fc_norm", {"config": {"fc_norm": True}}, "note", None, "honours"),
    ("norms.norm_before_fc", {"config": {"norm_before_fc": True}}, "wrong", "specforge", "ignores"),
    ("tensors.fc_norm", {"config": {"fc_norm": True}}, "wrong", None, "no fc_norm"),
    ("tensors.fc_norm", {"tensors": {"fc_norm.0.weight": torch.ones(8)}}, "wrong", "sglang", "not set"),
    (
        "tensors.norm_before_fc",
        {"tensors": {"input_norm.weight": torch.ones(24)}},
        "wrong",
        "vllm",
        "not set",
    ),
    ("tensors.unknown", {"tensors": {"gate.weight": torch.ones(2)}}, "wrong", "vllm", "gate.weight"),
    ("tensors.unknown", {"tensors": {"gate.weight": torch.ones(2)}}, "warning", "sglang", "gate.weight"),
    ("tensors.fc_bias", {"tensors": {"fc.bias": torch.ones(8)}}, "wrong", "vllm", "bias"),
    ("tensors.bias", {"tensors": {"midlayer.mlp.up_proj.bias": torch.ones(12)}}, "wrong", "sglang", "biases"),
    (
        "tensors.later_norm",
        {"tensors": {"layers.1.input_layernorm.weight": torch.ones(8)}},
        "wrong",
        "sglang",
        "hidden_norm",
    ),
    (
        "tensors.later_norm",
        {"tensors": {"layers.1.hidden_norm.weight": torch.ones(8)}},
        "wrong",
        "vllm",
        "input_layernorm",
    ),
    (
        "weights.embedding",
        {"tensors": {"embed_tokens.weight": torch.ones(40, 8)}},
        "warning",
        "sglang",
        "replaces",
    ),
    ("weights.embedding", {"config": {"target_hidden_size": 12}}, "wrong", "vllm", "no embedding"),
    ("weights.width", {"tensors": {"embed_tokens.weight": torch.ones(40, 6)}}, "wrong", None, "embed_tokens"),
    ("weights.width", {"tensors": {"lm_head.weight": torch.ones(11, 8)}}, "wrong", None, "lm_head"),
    ("weights.lm_head", {"tensors": {"lm_head.weight": None}}, "wrong", "sglang", "no lm_head"),
    ("weights.tied", {"config": {"tie_word_embeddings": True}}, "wrong", "sglang", "tie_word_embeddings"),
    ("vocabulary.lost", {"tensors": {"d2t": None, "t2d": None}}, "wrong", "vllm", "no d2t"),
    (
        "vocabulary.identity",
        {"tensors": {"d2t": torch.zeros(10).long(), "t2d": None}},
        "warning",
        "vllm",
        "zeros",
    ),
    (
        "vocabulary.absolute",
        {"tensors": {"d2t": torch.tensor([0, 1, 3, 4, 7, 8, 9, 16, 28, 39]), "t2d": None}},
        "wrong",
        "sglang",
        "absolute",
    ),
    ("vocabulary.d2t", {"tensors": {"d2t": torch.tensor([9, *[0] * 9])}}, "wrong", "vllm", "neither"),
    ("vocabulary.d2t", {"tensors": {"d2t": torch.zeros(10)}}, "wrong", "vllm", "float32"),
    ("vocabulary.d2t", {"tensors": {"d2t": torch.zeros(9).long()}}, "wrong", "vllm", "9 entries"),
    ("vocabulary.t2d", {"tensors": {"t2d": torch.ones(40).bool()}}, "warning", None, "t2d marks 40"),
    ("vocabulary.superfluous", {"config": {"vocab_size": 10}}, "wrong", "vllm", "whole vocabulary"),
    (
        "inputs.fed",
        {"inputs": 4, "config": {"num_aux_hidden_states": 4}},
        "wrong",
        "vllm.v1",
        "3 states captured, and fc eats 4",
    ),
    ("inputs.built", {"inputs": 4}, "wrong", "sglang", "builds fc for 3"),
    ("inputs.width", {"tensors": {"fc.weight": torch.ones(8, 20)}}, "wrong", None, "20 columns"),
    ("architecture.name", {"config": {"architectures": ["Acme"]}}, "wrong", "vllm", "Acme"),
    ("architecture.model_type", {"config": {"model_type": "deepseek_v3"}}, "wrong", "vllm", "MTP"),
    ("own.field", {"config": {"hidden_size": "8"}}, "wrong", None, "'8'"),
    (
        "rope.two_spellings",
        {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        "wrong",
        None,
        "500000",
    ),
    ("ids.type", {"nested": ["1", "5", "8"]}, "wrong", None, "'1'"),
    ("ids.type", {"nested": "1,5,8"}, "wrong", None, "not a list"),
    ("ids.empty", {"nested": []}, "warning", None, "empty"),
    ("ids.duplicate", {"nested": [1, 1, 8]}, "wrong", None, "more than once"),
    ("ids.unsorted", {"nested": [8, 5, 1]}, "warning", None, "does not ascend"),
    ("ids.negative", {"nested": [-1, 5, 8]}, "warning", None, "negative"),
    ("ids.two_lists", {"config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}, "wrong", None, "disagree"),
]


@pytest.mark.parametrize(("check", "fault", "severity", "engine", "words"), FAULTS)
def test_a_fault_is_found_and_named(raw_head, check, fault, severity, engine, words):
    report = explain_head(raw_head(**{"nested": [1, 5, 8], **fault}), LLAMA)
    named = [finding for finding in report.findings if finding.check == check]
    assert any(
        finding.severity == severity
        and (engine is None or engine in finding.engines)
        and words in finding.what
        for finding in named
    ), [(f.check, f.severity, f.what) for f in report.findings]


def test_lists_that_name_the_same_states_agree(raw_head):
    head = raw_head(nested=[1, 5, 8], config={"eagle_aux_hidden_state_layer_ids": [2, 6, 9]})
    assert "ids.two_lists" not in found(head)
    # To deepseek_v2, [1, ...] are outputs and [2, ...] inputs; a list that starts with 3 is read as inputs.
    deepseek = ExplainOptions(family="deepseek_v2", layers=12, written_for="sglang")
    other = raw_head(nested=[3, 5, 8], config={"eagle_aux_hidden_state_layer_ids": [4, 6, 9]}, name="other")
    assert "one layer" in found(other, deepseek)["ids.two_lists"].why


def test_norm_output_of_specforge_is_wrong_in_servers_and_right_where_it_is_left_out(raw_head):
    by_specforge = found(raw_head(nested=[1, 5, 8], config={"norm_output": True}))["norms.norm_output"]
    assert "before lm_head and the un-normed output fed back" in by_specforge.why
    assert "feed the normed output back" in by_specforge.why
    assert "norms.norm_output" not in found(raw_head(nested=[1, 5, 8], name="without"))


def test_a_nested_norm_output_is_not_seen(raw_head):
    config = {"eagle_config": {"norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]}}
    taken = [
        finding
        for finding in explain_head(raw_head(config=config), LLAMA).findings
        if finding.check == "norms.norm_output" and finding.severity == "wrong"
    ]
    assert {"sglang", "vllm"} <= {engine for finding in taken for engine in finding.engines}


def test_a_speculators_layout_that_vllm_does_not_take_for_one(raw_head):
    """Without its mark, or with layers of a kind that it has no draft for."""
    asked = ExplainOptions(family="llama", layers=12)
    unmarked = raw_head("speculators", config={"speculators_config": None})
    assert "vllm" in {
        e for f in explain_head(unmarked, asked).findings for e in f.engines if "layout" in f.check
    }
    other = raw_head(
        "speculators", config={"transformer_layer_config": {"model_type": "gpt_oss"}}, name="other"
    )
    assert "gpt_oss" in found(other, asked)["architecture.name"].what


def test_modelopts_two_traps_and_the_yarn_it_adds(raw_head):
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    by = found(raw_head("modelopt", nested=[1, 5, 8], config={"rope_scaling": yarn}))
    assert "unshifted" in by["writers.modelopt_ids"].what
    assert "input_layernorm" in by["writers.modelopt_norms"].why
    assert "eagle_export_rope_scaling" in by["rope.injected"].do
    assert not set(found(raw_head(nested=[1, 5, 8], name="eagle"))) & {
        "writers.modelopt_ids",
        "writers.modelopt_norms",
        "rope.injected",
    }


@pytest.mark.parametrize(("version", "warned"), [("0.39.0", False), ("0.41.0", True), ("0.47.0", True)])
def test_modelopts_extra_norm_came_with_0_41(raw_head, version, warned):
    quantised = {"producer": {"name": "modelopt", "version": version}}
    by = found(raw_head("modelopt", nested=[1, 5, 8], config={"quantization_config": quantised}))
    assert ("writers.modelopt_norms" in by) == warned


def test_a_speculators_head_without_the_flag_is_normed_by_vllm_and_not_by_its_trainer(raw_head):
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
    asked = ExplainOptions(family="llama", layers=12)
    left_out = found(raw_head("speculators", config={**ids, "norm_before_residual": None}), asked)
    assert "takes norm_before_residual for true" in left_out["norms.norm_before_residual"].what
    written = explain_head(raw_head("speculators", config=ids, name="written"), asked).findings
    assert "norms.norm_before_residual" not in {finding.check for finding in written}
    unread = {e for finding in written if finding.check == "architecture.layout" for e in finding.engines}
    assert unread == {"sglang", "specforge"}


def test_a_head_of_the_final_state_alone(raw_head):
    alone = {"eagle_config": {"use_aux_hidden_state": False}}
    asked = ExplainOptions(family="llama", layers=12)
    without = explain_head(raw_head(config=alone, tensors={"fc.weight": None}), asked)
    assert [(state.point, state.norm) for state in without.trained.inputs] == [("final_norm", "normed")]
    by = {row.engine: row.verdict for row in without.rows}
    assert by["vllm.v1"].outcome == "same"
    assert by["vllm.v2-0.30"].outcome == "differs", "this runner does not look at the flag"
    assert "inputs.fc_unused" in found(raw_head(config=alone, name="with"), asked)


def captures(library, *points):
    """A row of a table: what that library captures when it reads the file."""
    states = tuple(state_of(Point.parse(point), 12) for point in points)
    about = {"engine": library, "library": library, "versions": "1.0", "rank": "verified", "source": "a file"}
    right = Verdict(outcome="same")
    return Row(**about, read_on="2026-11-30", asked="file", newest=True, captured=states, verdict=right)


@pytest.mark.parametrize(
    ("library", "fed", "columns", "fault"),
    [
        ("sglang", ["post.5"], 8, "inputs.fc_skipped"),
        ("sglang", ["post.5"], 24, "inputs.fc_skipped"),
        ("sglang", ["post.1", "post.5"], 24, "inputs.fed"),
        ("sglang", ["post.1", "post.5", "post.8"], 24, None),
        ("vllm", ["post.5"], 8, None),
        ("vllm", ["post.5"], 24, "inputs.fed"),
    ],
)
def test_a_single_state_makes_sglang_skip_fc(raw_head, library, fed, columns, fault):
    config = {"num_aux_hidden_states": columns // 8}
    head = raw_head(config=config, tensors={"fc.weight": torch.ones(8, columns)})
    subject = head_subject(head, LLAMA, Known())
    found = [finding.check for finding in check_inputs(subject, [captures(library, *fed)])]
    assert found == ([] if fault is None else [fault])


def test_an_fc_that_does_nothing_may_be_skipped(raw_head):
    subject = head_subject(
        raw_head(config={"num_aux_hidden_states": 1}, tensors={"fc.weight": torch.eye(8)}), LLAMA, Known()
    )
    assert not list(check_inputs(subject, [captures("sglang", "post.5")]))


@pytest.fixture
def target(tmp_path):
    """A target's directory with a config alone."""

    def write(**config):
        place = tmp_path / "target"
        place.mkdir()
        right = {"model_type": "llama", "num_hidden_layers": 12, "hidden_size": 8, "vocab_size": 40}
        right["num_attention_heads"] = 2
        (place / "config.json").write_text(json.dumps(right | config))
        return str(place)

    return write


def against(directory, model):
    return {
        f.check: f
        for f in explain_head(directory, ExplainOptions(target=model, written_for="sglang")).findings
    }


@pytest.mark.parametrize(
    ("theirs", "check", "words"),
    [
        ({"rope_theta": 500000.0}, "rope.theta", "10000, the target's 500000"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope.scaling",
            "is default, and the target's is yarn",
        ),
        ({"hidden_size": 12}, "weights.embedding", "8 wide and the target 12"),
        ({"hidden_size": 12}, "inputs.fed", "2 states"),
        ({"vocab_size": 44}, "vocabulary.t2d", "44 tokens"),
    ],
)
def test_a_head_against_its_target(raw_head, target, theirs, check, words):
    by = against(raw_head(nested=[1, 5, 8]), target(**theirs))
    assert check in by, sorted(by)
    if check != "inputs.fed":
        assert words in by[check].what


def test_rope_scaling_takes_the_place_of_rope_parameters_as_in_transformers(raw_head, target):
    both = {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert LlamaConfig.from_dict(both).rope_parameters["rope_type"] == "yarn"
    by = against(raw_head(nested=[1, 5, 8], config=both), target(rope_theta=10000.0))
    assert "the head's RoPE scaling is yarn, and the target's is default" in by["rope.scaling"].what


def test_a_target_of_the_same_rope_raises_nothing(raw_head, target):
    by = against(raw_head(nested=[1, 5, 8]), target(rope_theta=10000.0))
    assert not [check for check in by if check.startswith("rope")]


def test_a_target_that_transformers_does_not_know_is_read_as_it_stands(raw_head, target):
    inner = {"model_type": "nobody", "num_hidden_layers": 12, "hidden_size": 8, "vocab_size": 40}
    model = target(model_type="kimi_k25", text_config=inner, num_hidden_layers=None)
    report = explain_head(raw_head(nested=[2, 5, 8]), ExplainOptions(target=model, written_for="sglang"))
    assert (report.target.family, report.target.n_layers) == ("kimi_k25", 12)
    assert [state.point for state in report.trained.inputs] == ["post.1", "post.4", "post.7"]


def test_a_model_that_adds_something_between_layers_keeps_both_sides_apart(raw_head, tmp_path):
    model = tiny.model("qwen3_vl")
    split = sorted(find_anatomy(model).split_boundaries)
    model.config.save_pretrained(tmp_path / "qwen")
    spec = CaptureSpec.parse(", ".join(f"post.{boundary - 1}" for boundary in split))
    report = explain_head(
        raw_head(config={"eagle_aux_hidden_state_layer_ids": split}, inputs=len(split)),
        ExplainOptions(target=str(tmp_path / "qwen"), spec=spec),
    )
    for row in report.rows:
        if row.library == "vllm" and row.newest:  # pre.k, after what is added
            assert "adds something between the two" in row.verdict.how[0]
