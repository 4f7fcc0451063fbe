"""Which engines a directory is right for, and what it holds where it is not."""

import pytest
import torch

from capture_hooks.conventions import BUILTIN
from capture_hooks.heads.engines import sglang_ids, statements, vllm_ids
from capture_hooks.spec import CaptureSpec, Point

PLAIN = {"norm_before_residual": False}


def stated(text, *, n=12, family="llama", split=False, fields=PLAIN, tensors=None):
    points = CaptureSpec.parse(text).inputs
    found = statements(points, n, family, split, fields, tensors or {}, "0.1")
    return {statement.engine: statement for statement in found}


def test_the_usual_layers_are_right_everywhere():
    by = stated("post.1, post.5, post.8")
    assert all(statement.right for statement in by.values())
    assert by["sglang"].ids == [1, 5, 8]
    assert by["vllm"].ids == [2, 6, 9]
    assert by["sglang"].versions == "0.5.23"
    assert by["vllm"].versions == "0.32.0 to 0.33.0"
    assert str(by["sglang"]) == (
        "sglang 0.5.23: right, reads eagle_config.eagle_aux_hidden_state_layer_ids = [1, 5, 8]"
    )


def test_ids_follow_the_family():
    assert stated("post.2, post.5, post.8", family="llama")["sglang"].ids == [2, 5, 8]
    assert stated("post.2, post.5, post.8", family="deepseek_v3")["sglang"].ids == [3, 6, 9]
    assert stated("post.2, post.5, post.11", family="gemma4_text")["sglang"].ids == [2, 5, 11]


@pytest.mark.parametrize(
    ("request_", "engine", "why"),
    [
        ({"text": "embed, post.5"}, "sglang", "embed"),
        ({"text": "post.5, post.11"}, "sglang", "post.11"),
        ({"text": "post.0, post.5", "family": "deepseek_v2"}, "sglang", "post.0 comes first"),
        ({"text": "embed, post.5", "family": "deepseek_v2"}, "vllm", "embed"),
        ({"text": "post.5, final_norm"}, "sglang", "final_norm"),
        ({"text": "post.5, final_norm"}, "vllm", "final_norm"),
        ({"text": "post.5, post.7", "family": "gpt2"}, "sglang", "set_eagle3_layers_to_capture"),
        ({"text": "post.2, post.5", "split": True, "family": "qwen3_vl"}, "sglang", "between layers"),
        ({"text": "post.2, post.5", "split": True, "family": "qwen3_vl"}, "vllm", "between layers"),
        (
            {"text": "post.2, post.5", "fields": {"norm_before_residual": True}},
            "sglang",
            "norm_before_residual",
        ),
        ({"text": "post.2, post.5", "fields": {"attention_bias": True}}, "sglang", "biases"),
        ({"text": "post.2", "tensors": {"fc.weight": torch.ones(4, 4)}}, "sglang", "skips fc"),
        (
            {"text": "post.2", "tensors": {"layers.1.input_layernorm.weight": torch.ones(4)}},
            "sglang",
            "hidden_norm",
        ),
        (
            {"text": "post.2", "tensors": {"layers.1.hidden_norm.weight": torch.ones(4)}},
            "vllm",
            "input_layernorm",
        ),
        ({"text": "post.2, post.5", "tensors": {"fc.bias": torch.ones(4)}}, "vllm", "no bias"),
        ({"text": "post.2, post.5"}, "specforge", "exactly three inputs, not 2"),
        ({"text": "embed, post.2, post.5"}, "specforge", "captures through SGLang, where sglang.llama"),
        ({"text": "post.1, post.2, post.5", "fields": {"num_hidden_layers": 2}}, "specforge", "one layer"),
        (
            {"text": "post.1, post.2, post.5", "fields": {"norm_output": True}},
            "specforge",
            "un-normed output",
        ),
        ({"text": "post.1, post.2, post.5", "fields": {"norm_before_fc": True}}, "specforge", "whole input"),
        (
            {"text": "post.2, post.5", "tensors": {"embed_tokens.weight": torch.ones(4)}},
            "sglang",
            "embedding",
        ),
    ],
)
def test_what_an_engine_cannot_do_excludes_it_and_leaves_it_no_ids(request_, engine, why):
    by = stated(**request_)
    assert by["embedded"].right
    assert not by[engine].right
    assert why in "; ".join(by[engine].excluded)
    assert by[engine].ids is None
    if engine in ("sglang", "vllm"):
        assert why in str(sglang_ids(by[engine]) if engine == "sglang" else vllm_ids(by[engine]))


def test_one_input_is_right_where_fc_is_the_identity():
    assert stated("post.5", tensors={"fc.weight": torch.eye(4)})["sglang"].right


def test_norms_under_both_names_are_right_everywhere():
    gain = torch.ones(4)
    by = stated(
        "post.4, post.5, post.6",
        tensors={"layers.1.hidden_norm.weight": gain, "layers.1.input_layernorm.weight": gain},
    )
    assert all(statement.right for statement in by.values())


def test_vllm_keeps_settings_that_sglang_ignores():
    by = stated("post.2, post.5", fields={"norm_before_residual": True})
    assert by["vllm"].right
    assert by["vllm"].ids == [3, 6]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "gemma3_text"])
def test_ids_read_back_as_the_points(family):
    points = CaptureSpec.parse("post.1, post.5, post.8").inputs
    for statement in stated("post.1, post.5, post.8", family=family).values():
        if statement.ids is not None:
            read = BUILTIN[statement.convention].to_points(statement.ids, 12)
            assert [p.resolve(12) for p in read] == [p.resolve(12) for p in points]


def test_refusals_stop_the_setters_of_both_engines():
    """The arithmetic of the setters (SGLang 0.5.23's four kinds, vLLM 0.33's) raises on a refusal."""
    by = stated("post.5, final_norm")
    nested, top = sglang_ids(by["sglang"]), vllm_ids(by["vllm"])
    with pytest.raises(TypeError):
        [value + 1 for value in nested]  # llama and most others
    with pytest.raises(KeyError):
        nested[0]  # deepseek_v2, glm4_moe_lite
    with pytest.raises(TypeError):
        max(nested) == 12 or [value + 1 for value in nested]  # gpt_oss
    with pytest.raises(TypeError):
        sorted(set(top))
    assert isinstance(top, list)
    assert top  # an empty or missing list would mean vLLM's default layers


def test_points_are_taken_in_file_order():
    assert [str(p) for p in (Point.post(1), Point.post(5))] == ["post.1", "post.5"]
    assert stated("post.1, post.5")["vllm"].ids == [2, 6]
