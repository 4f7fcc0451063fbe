"""Files that say one thing in two places: RoPE, a later layer's norm, and the window of attention."""

import pytest
import torch

from capture_hooks.interop.explain import ExplainOptions, agrees, explain_head

TWO = {"num_hidden_layers": 2, "eagle_aux_hidden_state_layer_ids": [2, 6, 9]}


def layer(hidden_norm, input_layernorm):
    return {
        **{f"layers.1.self_attn.{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"},
        **{f"layers.1.mlp.{name}_proj.weight": torch.ones(12, 8) for name in ("gate", "up")},
        "layers.1.mlp.down_proj.weight": torch.ones(8, 12),
        "layers.1.post_attention_layernorm.weight": torch.ones(8),
        "layers.1.hidden_norm.weight": torch.ones(8) * hidden_norm,
        "layers.1.input_layernorm.weight": torch.ones(8) * input_layernorm,
    }


def by_check(directory, written_for="specforge"):
    report = explain_head(directory, ExplainOptions(family="llama", layers=12, written_for=written_for))
    return report, {(f.check, f.severity): set(f.engines) for f in report.findings}


@pytest.mark.parametrize(
    ("writer", "severity", "engines"),
    [
        ("specforge", "warning", {"sglang", "vllm"}),
        ("sglang", "wrong", {"vllm"}),
        ("vllm", "wrong", {"sglang"}),
    ],
)
def test_two_norms_of_a_later_layer_that_differ(raw_head, writer, severity, engines):
    head = raw_head(nested=[1, 5, 8], config=TWO, tensors=layer(1.0, 2.0))
    assert by_check(head, writer)[1]["tensors.two_norms", severity] == engines
    alike = raw_head(nested=[1, 5, 8], config=TWO, tensors=layer(2.0, 2.0), name="alike")
    assert "tensors.two_norms" not in {check for check, _ in by_check(alike, writer)[1]}


YARN = {"rope_type": "yarn", "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("rope", "found"),
    [
        ({"rope_scaling": YARN, "rope_parameters": PLAIN}, True),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 10000.0}}, False),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_parameters": YARN}, False),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_theta": None}, True),
        ({"rope_parameters": {**PLAIN, "rope_theta": 5e5}}, True),
        ({"rope_parameters": PLAIN}, False),
        ({"rope_parameters": "yarn", "rope_scaling": YARN}, False),
    ],
)
def test_two_spellings_of_rope_need_no_target_to_disagree(raw_head, rope, found):
    named = by_check(raw_head(nested=[1, 5, 8], config=rope))[1]
    assert (("rope.two_spellings", "wrong") in named) == found


WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 64}
VLLM_TOO = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}


@pytest.mark.parametrize(
    ("writer", "config", "refused"),
    [
        ("specforge", WINDOW, {"vllm"}),
        ("sglang", WINDOW, {"sglang"}),
        ("sglang", WINDOW | {"max_position_embeddings": 65}, {"sglang"}),
        ("sglang", WINDOW | {"max_position_embeddings": 64}, set()),
        ("specforge", WINDOW | {"max_position_embeddings": 64}, set()),
        ("sglang", {"layer_types": ["full_attention"], "sliding_window": 64}, set()),
        ("sglang", {"layer_types": ["full_attention"] * 2, "sliding_window": 64}, {"sglang", "vllm"}),
        ("sglang", {"layer_types": None, "sliding_window": 64}, set()),
    ],
)
def test_a_window_that_one_engine_keeps(raw_head, writer, config, refused):
    report, _ = by_check(raw_head(nested=[1, 5, 8], config=config | VLLM_TOO), writer)
    assert {engine for engine in ("sglang", "vllm") if not agrees(report, [engine])} == refused


def test_layer_types_are_one_for_each_layer(raw_head):
    tensors = layer(1.0, 1.0)
    one = raw_head(nested=[1, 5, 8], config=TWO | {"layer_types": ["full_attention"]}, tensors=tensors)
    assert "attention.layer_types" in {check for check, _ in by_check(one)[1]}
    two = TWO | {"layer_types": ["full_attention"] * 2}
    report, _ = by_check(raw_head(nested=[1, 5, 8], config=two, tensors=tensors, name="two"))
    assert agrees(report, ["sglang", "vllm"])


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 5.0, 8], "2.0 for 2"),
        ([True, 5, 8], "true for 1"),
        ([1, "5", 8.0], "no reader"),
        ([1, 5.5], "no reader"),
    ],
)
def test_what_becomes_of_ids_that_are_no_integers(raw_head, ids, words):
    report, _ = by_check(raw_head(nested=ids))
    assert words in next(finding.why for finding in report.findings if finding.check == "ids.type")
