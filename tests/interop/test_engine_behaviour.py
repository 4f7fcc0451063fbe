"""What `explain` claims about engines, against the engines' own draft classes."""

import json
from pathlib import Path

import peer
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM

from capture_hooks.conventions.facts import (
    ARCHITECTURES,
    FLAGS,
    MTP_TYPES,
    RULES,
    SPECULATORS_TYPES,
    draft_of,
    fc_inputs,
    flag_rule,
)
from capture_hooks.interop.explain.checks.config import MODELOPT_MARKS
from capture_hooks.interop.explain.checks.seen import as_vllm_reads
from capture_hooks.plugins import registry
from capture_hooks.testing import tiny

HIDDEN, VOCABULARY, INTER, LAYERS = 16, 64, 24, 8
IDS = [3, 1, 4, 1, 5]
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
#: On a CPU SGLang has no other RoPE for that attention.
YARN = {
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
}
NORMS = [flag for flag in FLAGS if flag != "use_aux_hidden_state"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny llama, by path."""
    place = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def mla_target(tmp_path_factory):
    """A tiny deepseek_v2, by path: its cache is the one that SGLang's MLA draft needs."""
    place = tmp_path_factory.mktemp("mla-target")
    torch.manual_seed(0)
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        first_k_dense_replace=2,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        **MLA,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(place)
    tiny.tokenizer().save_pretrained(place)
    path = place / "config.json"
    document = json.loads(path.read_text()) | {"moe_layer_freq": 1, "scoring_func": "softmax", **YARN}
    document.pop("rope_parameters", None)
    path.write_text(json.dumps(document))
    return str(place)


@pytest.fixture(scope="module")
def engines():
    """Each library's worker, started when it is first asked."""
    started = {}

    def engine(name):
        if name not in started:
            library = name.partition("-")[0]
            started[name] = peer.Peer(library, f"behaviour_{library}")
        return started[name]

    yield engine
    for worker in started.values():
        worker.close()


@pytest.fixture
def head(tmp_path):
    """Writes a head with random weights; ``config`` and ``tensors`` are laid over, ``...`` removes one."""
    made = iter(range(1000))

    def write(config=(), tensors=(), inputs=3, seed=0, layers=1):
        place = tmp_path / f"head-{next(made)}"
        place.mkdir()
        document = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTER,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hidden_act": "silu",
            "vocab_size": VOCABULARY,
            "draft_vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            "dtype": "float32",
            **dict(config),
        }
        held = random_weights(inputs, layers, seed) | dict(tensors)
        save_file({k: v for k, v in held.items() if v is not ...}, place / "model.safetensors")
        document = {key: value for key, value in document.items() if value is not ...}
        (place / "config.json").write_text(json.dumps(document))
        return str(place)

    return write


def random_weights(inputs, layers, seed):
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    def gain(width):
        return torch.rand(width, generator=generator) + 0.5

    held = {"fc.weight": matrix(HIDDEN, inputs * HIDDEN), "norm.weight": gain(HIDDEN)}
    held["lm_head.weight"] = matrix(VOCABULARY, HIDDEN)
    for layer in range(layers):
        at = f"layers.{layer}." if layer else "midlayer."
        for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
            held[f"{at}{norm}.weight"] = gain(HIDDEN)
        for name in "qkv":
            held[f"{at}self_attn.{name}_proj.weight"] = matrix(16, HIDDEN if layer else 2 * HIDDEN)
        held[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, 16)
        held[f"{at}mlp.gate_proj.weight"] = matrix(INTER, HIDDEN)
        held[f"{at}mlp.up_proj.weight"] = matrix(INTER, HIDDEN)
        held[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, INTER)
    return held


def states(inputs=3):
    return torch.randn(len(IDS), inputs * HIDDEN, generator=torch.manual_seed(1)).mul(3).tolist()


def run(engines, name, target, directory, inputs=3):
    """A draft's outputs: before ``lm_head`` (SpecForge: logits), what it feeds back, and in vLLM, where no
    attention is computed, what each layer's attention is given.
    """
    fed = states(inputs)
    where = [directory] if name == "specforge" else [target, directory]
    found = engines(name)("run", *where, fed, IDS)
    found["out"] = torch.tensor(found.get("logits") or found["hidden"])
    found["fed_back"] = torch.tensor(found["fed_back"])
    if "attended" in found:
        found["attended"] = torch.cat([torch.tensor(rows).flatten() for rows in found["attended"]])
    return found


def same(left, right):
    keys = ("out", "fed_back", *(["attended"] if "attended" in left else []))
    return all(torch.allclose(left[key], right[key], atol=1e-5) for key in keys)


def laid(key, value):
    """A config with ``value`` under a dotted key."""
    first, _, rest = key.partition(".")
    return {first: {rest: value} if rest else value}


def norms_of(flag):
    """The weights that a flag turns on, far from one."""
    if flag == "norm_before_fc":
        return {"input_norm.weight": torch.linspace(0.2, 3, 3 * HIDDEN)}
    if flag == "fc_norm":
        return {f"fc_norm.{i}.weight": torch.linspace(0.2, 3, HIDDEN) * (i + 1) for i in range(3)}
    return {}


#: What makes a head of another draft class: fields and tensors laid over a llama's.
KINDS = {
    "llama": ({}, {}),
    "qwen3": (
        {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"},
        {f"midlayer.self_attn.{name}_norm.weight": torch.ones(8) for name in "qk"},
    ),
    "mla": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        | {"first_k_dense_replace": 1, "n_routed_experts": 2, "moe_intermediate_size": 8}
        | MLA
        | YARN,
        {f"midlayer.self_attn.{name}_proj.weight": ... for name in "qkv"}
        | {
            "midlayer.self_attn.q_a_proj.weight": torch.ones(8, 2 * HIDDEN),
            "midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(16, 2 * HIDDEN),
            "midlayer.self_attn.q_a_layernorm.weight": torch.ones(8),
            "midlayer.self_attn.kv_a_layernorm.weight": torch.ones(8),
            "midlayer.self_attn.q_b_proj.weight": torch.ones(32, 8),
            "midlayer.self_attn.kv_b_proj.weight": torch.ones(32, 8),
        },
    ),
}
VERIFIED = [rule for rule in RULES if rule.rank == "verified" and rule.flag in NORMS]


@pytest.mark.parametrize("rule", VERIFIED, ids=lambda rule: f"{rule.engine}-{rule.draft}-{rule.flag}")
def test_a_flag_does_what_is_claimed(engines, target, mla_target, head, rule):
    kind, extra = KINDS[rule.draft]
    place = (
        ("sglang-mla", mla_target)
        if (rule.engine, rule.draft) == ("sglang", "mla")
        else (rule.engine, target)
    )

    def outputs(config, tensors=()):
        return run(engines, *place, head(kind | dict(config), extra | dict(tensors)))

    off, absent = outputs({rule.flag: False}), outputs({})
    if rule.does == "ignores":
        assert all(same(result, off) for result in (outputs({rule.flag: True}), absent))
        return
    on = [outputs(laid(key, True), norms_of(rule.flag)) for key in rule.keys]
    assert not any(same(result, off) for result in on)
    assert same(absent, on[0] if rule.absent else off)
    assert same(on[0], on[-1])
    if rule.flag == "norm_output" and rule.does == "honours":
        assert torch.allclose(on[0]["out"], on[0]["fed_back"], atol=1e-5)
        assert not torch.allclose(off["out"], off["fed_back"], atol=1e-2)
        nested = outputs({"eagle_config": {"norm_output": True}})
        assert same(nested, off), "a nested norm_output is not seen"
    if rule.does == "other":  # SpecForge: the norm before lm_head alone
        assert torch.allclose(on[0]["fed_back"], off["fed_back"])


WIDTHS = [
    {"num_aux_hidden_states": 4},
    {"num_aux_hidden_states": 2, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}},
    {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]},
    {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "eagle_aux_hidden_state_layer_ids": [5]},
    {},
]


@pytest.mark.parametrize("name", ["sglang", "vllm", "specforge"])
@pytest.mark.parametrize("config", WIDTHS, ids=json.dumps)
def test_fc_is_built_for_as_many_states_as_claimed(engines, target, head, name, config):
    claimed, _ = fc_inputs(name, "llama", config)
    found = run(engines, name, target, head(config, inputs=claimed), claimed)
    assert found["fc_inputs"] == claimed * HIDDEN


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_fc_of_mla_drafts(engines, target, mla_target, head, name):
    kind, extra = KINDS["mla"]
    place = ("sglang-mla", mla_target) if name == "sglang" else (name, target)
    for config in WIDTHS:
        claimed, _ = fc_inputs(name, "mla", config)
        found = run(engines, *place, head(kind | config, extra, inputs=claimed), claimed)
        assert found["fc_inputs"] == claimed * HIDDEN


def test_mla_drafts_that_are_refused(engines, target, mla_target, head):
    """More than one layer by SGLang; by vLLM a model type that it takes for DeepSeek's own MTP layer."""
    kind, extra = KINDS["mla"]
    with pytest.raises(peer.PeerError, match="only supports 1 layer"):
        run(engines, "sglang-mla", mla_target, head(kind, extra, layers=2))
    for model_type in MTP_TYPES:
        with pytest.raises(peer.PeerError, match="MTPModel"):
            run(engines, "vllm", target, head(kind | {"model_type": model_type}, extra))


def test_vllms_qwen3_draft_counts_the_top_level_list_too(engines, target, head):
    kind, extra = KINDS["qwen3"]
    for config in (*WIDTHS, {"num_aux_layers": 2}):
        claimed, _ = fc_inputs("vllm", "qwen3", config)
        found = run(engines, "vllm", target, head(kind | config, extra, inputs=claimed), claimed)
        assert (found["module"].rpartition(".")[2], found["fc_inputs"]) == ("qwen3_eagle3", claimed * HIDDEN)


def test_sglang_skips_the_fc_of_a_head_of_one_input(engines, target, head):
    config = {"num_aux_hidden_states": 1}
    other = {"fc.weight": torch.randn(HIDDEN, HIDDEN)}

    def outputs(name, tensors=()):
        return run(engines, name, target, head(config, tensors, inputs=1), 1)

    assert same(outputs("sglang"), outputs("sglang", other))
    assert not same(outputs("vllm"), outputs("vllm", other))


@pytest.mark.parametrize(("name", "norm"), [("sglang", "hidden_norm"), ("vllm", "input_layernorm")])
def test_later_draft_layers_are_normed_by_one_name_alone(engines, target, head, name, norm):
    (unused,) = {"hidden_norm", "input_layernorm"} - {norm}

    def outputs(which):
        gain = {f"layers.1.{which}.weight": torch.linspace(0.2, 3, HIDDEN)} if which else {}
        return run(engines, name, target, head(tensors=gain, layers=2))

    assert same(outputs(None), outputs(unused))
    assert not same(outputs(None), outputs(norm))


def test_unknown_tensors_are_skipped_by_sglang_and_refused_by_vllm(engines, target, head):
    strange = {"gate.weight": torch.ones(3)}
    right, more = head(), head(tensors=strange)
    assert same(run(engines, "sglang", target, right), run(engines, "sglang", target, more))
    with pytest.raises(peer.PeerError, match="gate"):
        run(engines, "vllm", target, more)


def test_norms_without_their_flag(engines, target, head):
    right = head()
    for flag in ("norm_before_fc", "fc_norm"):
        more = head(tensors=norms_of(flag))
        assert same(run(engines, "sglang", target, right), run(engines, "sglang", target, more))
    assert same(
        run(engines, "vllm", target, right),
        run(engines, "vllm", target, head(tensors=norms_of("norm_before_fc"))),
    )
    with pytest.raises(peer.PeerError, match="fc_norm"):
        run(engines, "vllm", target, head(tensors=norms_of("fc_norm")))


def test_biases(engines, target, head):
    plain = run(engines, "sglang", target, head())
    biased = head({"mlp_bias": True}, {"midlayer.mlp.up_proj.bias": torch.ones(INTER)})
    assert same(plain, run(engines, "sglang", target, biased))
    for name in ("sglang", "vllm"):
        with_bias = run(engines, name, target, head(tensors={"fc.bias": torch.ones(HIDDEN)}))
        assert same(run(engines, name, target, head()), with_bias)


def test_the_draft_vocabulary(engines, target, head):
    offsets = torch.tensor([0, 0, 1, 1, 3, 9, 9, 20])
    small = {"draft_vocab_size": 8}
    weights = {"lm_head.weight": torch.ones(8, HIDDEN), "d2t": offsets}
    found = run(engines, "sglang", target, head(small, weights))
    assert found["hot_token_id"] == (offsets + torch.arange(8)).tolist()
    assert run(engines, "sglang", target, head())["hot_token_id"] is None
    run(engines, "vllm", target, head(small, weights))
    with pytest.raises(peer.PeerError, match="draft_id_to_target_id"):
        run(engines, "vllm", target, head(tensors={"d2t": torch.zeros(VOCABULARY).long()}))


def test_tied_embeddings_and_a_shared_output_layer_in_sglang(engines, target, head):
    assert run(engines, "sglang", target, head({"tie_word_embeddings": True}))["lm_head_is_embedding"]
    assert not run(engines, "sglang", target, head())["lm_head_is_embedding"]
    shared = head({"draft_vocab_size": None}, {"lm_head.weight": ...})
    assert run(engines, "sglang", target, shared)["load_lm_head_from_target"]
    with pytest.raises(peer.PeerError, match="draft_vocab_size"):
        run(engines, "sglang", target, head({"draft_vocab_size": ...}))


def test_sglang_replaces_a_heads_own_embedding_of_the_targets_width(engines, target, head):
    own = {"embed_tokens.weight": torch.ones(VOCABULARY, HIDDEN)}
    wide = {"fc.weight": torch.ones(HIDDEN, 3 * 12)}
    assert engines("sglang")("embedding_after_sharing", target, head(tensors=own))
    assert not engines("sglang")(
        "embedding_after_sharing", target, head({"target_hidden_size": 12}, own | wide)
    )


MODULES = {"llama": "llama_eagle3", "qwen3": "qwen3_eagle3", "mla": "deepseek_eagle3"}


def test_architecture_names(engines):
    vllm = engines("vllm")
    claimed = ARCHITECTURES["vllm"]
    assert vllm("draft_modules", list(claimed)) == {name: MODULES[draft] for name, draft in claimed.items()}
    # The others (Peagle...) are reached from a speculators head alone: a raw one gets Eagle3 before its name.
    reached = {name for name in vllm("eagle3_names") if name.startswith("Eagle3") or name.endswith("Eagle3")}
    assert reached <= set(claimed)
    assert set(engines("sglang")("eagle3_names")) == set(ARCHITECTURES["sglang"])
    for name in ("Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3DraftModel"):
        assert draft_of("sglang", [name]) is None
        assert not engines("sglang")("serves", name)
    assert set(ARCHITECTURES["specforge"]) <= set(engines("specforge")("architectures"))


#: What the draft class reads of a speculators head.
READ = (
    "architectures",
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    *NORMS,
)
flag = st.sampled_from(["left out", True, False])


@given(
    st.fixed_dictionaries(dict.fromkeys(NORMS, flag)),
    st.sampled_from([None, [2, 6, 9], [1, 2, 3, 4]]),
    st.sampled_from([None, 24]),
    st.sampled_from(["llama", "qwen3", "gpt_oss", "left out"]),
    st.sampled_from(["eagle3", "peagle"]),
)
def test_a_speculators_config_is_translated_as_vllm_does(engines, flags, ids, width, kind, algorithm):
    inner = {"hidden_size": 16} if kind == "left out" else {"hidden_size": 16, "model_type": kind}
    config = {
        "speculators_model_type": algorithm,
        "draft_vocab_size": 32,
        "mask_token_id": 0,
        "eagle_aux_hidden_state_layer_ids": ids,
        "target_hidden_size": width,
        "transformer_layer_config": inner,
        **{name: value for name, value in flags.items() if value != "left out"},
    }
    ours = as_vllm_reads(config)
    try:
        theirs = engines("vllm")("draft_config", config)
    except peer.PeerError:
        assert ours is None
        return
    assert ours is not None
    draft, view = ours
    assert draft == SPECULATORS_TYPES[inner.get("model_type", "llama")]
    for name in READ[1:]:
        assert view.get(name) == theirs.get(name), name
    for name in NORMS:
        assert flag_rule("vllm", draft, name).value(view) == bool(theirs.get(name, False))


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
eagle_configs = st.one_of(
    anything,
    st.fixed_dictionaries(
        {},
        optional={
            "eagle_aux_hidden_state_layer_ids": st.lists(st.integers(0, LAYERS), min_size=1, max_size=3)
            | anything,
            "use_aux_hidden_state": st.booleans() | st.none(),
        },
    ),
)


@given(eagle_configs, st.none() | st.lists(st.integers(0, LAYERS), max_size=3))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sglangs_ids_are_those_that_our_reader_finds(engines, target, head, nested, top):
    place = head()
    path = Path(place, "config.json")
    config = json.loads(path.read_text()) | {"eagle_config": nested, "eagle_aux_hidden_state_layer_ids": top}
    path.write_text(json.dumps(config))
    eaten, ids = engines("sglang")("ids_of", target, place)
    reading = registry().readers["sglang"].read(config, "llama", LAYERS)
    if not eaten:
        assert [str(point) for point in reading.captured.points] == ["final_norm"]
    elif isinstance(ids, list):
        assert reading.ids == tuple(ids)
    elif ids is None:
        assert reading.ids is None
        assert reading.captured.points == registry().conventions["sglang.llama"].default(LAYERS).points


def test_modelopt_norms_the_states_twice(engines, target):
    found = engines("modelopt")("norms", target, torch.randn(6, HIDDEN).mul(3).tolist())
    assert found["twice"] < 1e-6
    assert found["once"] > 0.05


def test_modelopts_marks_and_its_yarn(engines, target):
    config = engines("modelopt")("exported", target, [0, 2, 5])
    assert set(config["eagle_config"]) >= MODELOPT_MARKS
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 2048,
    }
