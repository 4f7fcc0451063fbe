"""A saved head, loaded again, is the same head, and its directory says what it eats."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.capture import bind
from capture_hooks.heads import files, inspect_head, load_head, save_head
from capture_hooks.spec import CaptureSpec, Point
from capture_hooks.testing import tiny

LAYERS = 8
POINTS = [Point("embed"), *map(Point.pre, range(1, LAYERS)), Point.post(LAYERS - 1), Point("final_norm")]
IDS = [(11 * i * i + 5 * i) % 250 for i in range(17)]


def outputs(head, states):
    cache = head.new_cache(64)
    with torch.no_grad():
        hidden = head.extend(cache, states[:-1], torch.tensor(IDS[1:]), 0)
        last = head.step(cache, hidden[-1:], torch.tensor([IDS[-1]]), torch.tensor([len(IDS) - 1]))
        return head.logits(torch.cat([hidden, last]))


def captured(model, spec):
    with bind(model, spec) as capture, torch.no_grad():
        model(torch.tensor([IDS]), use_cache=False)
    return capture.states.packed


FLAGS = st.fixed_dictionaries(
    {
        "norm_before_residual": st.booleans(),
        "norm_output": st.booleans(),
        "layers": st.integers(1, 2),
    }
)
NORMS = st.sampled_from([{}, {"fc_norm": True}, {"norm_before_fc": True}])


@given(st.permutations(POINTS), st.integers(1, 4), FLAGS, NORMS, st.sampled_from([40, 10_000]))
@settings(deadline=None, max_examples=25)
def test_any_head_in_any_order_comes_back_bitwise(
    target, witness_of, make_head, tmp_path_factory, points, count, flags, norms, draft
):
    spec = CaptureSpec(tuple(points[:count]))
    head = make_head(target, spec, draft=draft, **flags, **(norms if count > 1 else {}))
    place = tmp_path_factory.mktemp("heads") / "head"
    save_head(head, place, model=target, witness=witness_of(target, spec))
    loaded = load_head(place, target)
    assert loaded.spec == spec
    assert torch.equal(loaded.draft_token_ids, head.draft_token_ids)
    states = captured(target, spec)
    assert torch.equal(outputs(loaded, states), outputs(head, states))
    described = inspect_head(place)
    assert described.spec == spec
    assert list(described.file_inputs) == sorted(spec.inputs, key=POINTS.index)


def test_the_files_columns_stand_in_ascending_depth(target, witness_of, make_head, tmp_path):
    spec = CaptureSpec.parse("post.6, embed, post.2")
    head = make_head(target, spec, fc_norm=True)
    save_head(head, tmp_path / "head", model=target, witness=witness_of(target, spec))
    _, tensors = files.read_tensors(tmp_path / "head" / files.WEIGHTS)
    width = target.config.hidden_size
    mine = head.fc.weight.detach().split(width, 1)
    for column, index in enumerate((1, 2, 0)):
        assert torch.equal(tensors["fc.weight"].split(width, 1)[column], mine[index])
        assert torch.equal(tensors[f"fc_norm.{column}.weight"], head.fc_norm[index].weight)


@pytest.fixture
def saved(target, witness_of, make_head, tmp_path):
    spec = CaptureSpec.parse("post.5, post.1, post.3")
    head = make_head(target, spec, fc_norm=True, norm_output=True)
    return save_head(head, tmp_path / "head", model=target, witness=witness_of(target, spec))


def test_config_holds_what_every_reader_needs(target, saved):
    config = json.loads((saved.directory / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "vocab_size": target.config.vocab_size,
        "draft_vocab_size": 40,
        "num_hidden_layers": 1,
        "num_aux_hidden_states": 3,
        "target_hidden_size": target.config.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    assert {name: config[name] for name in expected} == expected
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "norm_before_fc": False,
        "norm_output": True,
    }
    section = config["capture"]
    assert section["spec"]["inputs"] == ["post.5", "post.1", "post.3"]
    assert section["order"] == [1, 2, 0]
    assert section["file_inputs"] == ["post.1", "post.3", "post.5"]
    assert section["format"] == 1
    assert section["head"] == "eagle3"
    assert {e["engine"]: e["versions"] for e in section["engines"]}.items() >= {
        ("sglang", "0.5.23"),
        ("vllm", "0.32.0 to 0.33.0"),
    }


def test_weights_may_be_rounded(target, witness_of, make_head, tmp_path):
    spec = CaptureSpec.parse("post.1, post.3")
    head = make_head(target, spec)
    save_head(head, tmp_path / "head", model=target, witness=witness_of(target, spec), dtype=torch.bfloat16)
    loaded = load_head(tmp_path / "head", target)
    assert json.loads((tmp_path / "head" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, parameter in head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.bfloat16())
    assert torch.equal(loaded.draft_token_ids, head.draft_token_ids)


def test_an_un_normed_output_is_not_said_at_the_top(target, witness_of, make_head, tmp_path):
    """SpecForge 0.2.0 would take it for "no norm before lm_head"."""
    spec = CaptureSpec.parse("post.1, post.3")
    save_head(make_head(target, spec), tmp_path / "head", model=target, witness=witness_of(target, spec))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert "norm_output" not in config
    assert config["eagle_config"]["norm_output"] is False
    assert load_head(tmp_path / "head", target).config.norm_output is False


def test_tensors_carry_the_fields_names(saved):
    names = set(inspect_head(saved.directory).tensors)
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "fc_norm.2.weight"} <= names
    assert {n for n in names if n.startswith("midlayer.")} == {
        f"midlayer.{part}.weight"
        for part in (
            "hidden_norm",
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    }
    assert sorted(p.name for p in saved.directory.iterdir()) == [
        "capture",
        "config.json",
        "model.safetensors",
    ]


def test_a_whole_vocabulary_is_written_without_maps(target, witness_of, make_head, tmp_path):
    spec = CaptureSpec.parse("post.1, post.3")
    head = make_head(target, spec, draft=10_000)
    save_head(head, tmp_path / "head", model=target, witness=witness_of(target, spec))
    assert not {"d2t", "t2d"} & set(inspect_head(tmp_path / "head").tensors)
    assert torch.equal(
        load_head(tmp_path / "head", target).draft_token_ids, torch.arange(target.config.vocab_size)
    )


def test_the_report_says_who_is_excluded_and_why(target, witness_of, make_head, tmp_path):
    spec = CaptureSpec.parse("embed, post.3")
    head = make_head(target, spec, norm_before_residual=True)
    report = save_head(head, tmp_path / "head", model=target, witness=witness_of(target, spec))
    assert [statement.engine for statement in report.excluded] == ["sglang", "specforge"]
    assert "norm_before_residual" in str(report)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 4]
    assert isinstance(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"], dict)
    assert load_head(tmp_path / "head", target).spec == spec
    assert inspect_head(tmp_path / "head").engines == report.engines


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3", "deepseek_v3", "gpt_oss", "cohere"])
def test_targets_of_many_families(family, witness_of, make_head, tmp_path):
    model = tiny.model(family)
    spec = CaptureSpec.parse("post.1, embed")
    head = make_head(model, spec)
    save_head(head, tmp_path / "head", model=model, witness=witness_of(model, spec))
    assert torch.equal(load_head(tmp_path / "head", model).lm_head.weight, head.lm_head.weight)


def test_transformers_reads_the_config(target, saved):
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(saved.directory)
    assert type(read).__name__ == "LlamaConfig"
    assert read.architectures == ["LlamaForCausalLMEagle3"]
    assert read.rope_parameters == target.config.rope_parameters
    assert read.dtype == torch.float32
    assert read.tie_word_embeddings is False
    assert read.eagle_config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert read.capture["spec"]["inputs"] == ["post.5", "post.1", "post.3"]


SCALED = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1234.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1234.0},
        SCALED,
    ],
)
def test_rope_settings_stand_in_both_spellings(rope, witness_of, make_head, tmp_path):
    from transformers import AutoConfig

    model = tiny.llama(num_hidden_layers=4, rope_parameters=rope)
    spec = CaptureSpec.parse("post.0, post.2")
    save_head(make_head(model, spec), tmp_path / "head", model=model, witness=witness_of(model, spec))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["rope_theta"] == rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert config["rope_scaling"] == (None if rope["rope_type"] == "default" else scaling)
    assert AutoConfig.from_pretrained(tmp_path / "head").rope_parameters == rope


def test_whoever_may_read_the_config_may_read_the_weights(saved):
    modes = {path.stat().st_mode & 0o777 for path in saved.directory.rglob("*") if path.is_file()}
    assert len(modes) == 1, modes
