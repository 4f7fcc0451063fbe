"""vLLM's conventions and readers against vLLM 0.32: its readers, setters and loops, on tiny random models."""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer, PeerError

from capture_hooks.conventions import convention_for
from capture_hooks.errors import ConventionError
from capture_hooks.plugins import registry

VERSION = "0.32.0"
#: One of each loop that runs here, and the transformers backend (``smollm3`` to ``phi``).
FAMILIES = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi3",
        "granite",
        "apertus",
        "ernie4_5",
        "ministral3",
        "llama4_text",
    ),
    *("gpt_oss", "qwen3_moe", "gemma4_text", "deepseek_v2", "deepseek_v3"),
    *("smollm3", "olmo2", "gpt_neox", "phi"),
)
DEPTHS = st.sampled_from([1, 2, 3, 5, 7])


@pytest.fixture(scope="module")
def vllm() -> Iterator[Peer]:
    peer = Peer("vllm", "vllm_ids")
    yield peer
    peer.close()


def boundaries(points, n):
    return [point.resolve(n).boundary for point in points]


def theirs(ask, *args):
    try:
        return ask(*args)
    except PeerError as error:
        if error.kind == "AssertionError":  # the worker's own
            raise
        return error.kind


def ours(answer, n):
    try:
        return boundaries(answer().points, n)
    except ConventionError:
        return None


def agree(mine, peer):
    assert (mine is None) if isinstance(peer, str) else (mine == peer), (mine, peer)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=25)
@given(data=st.data(), n=DEPTHS)
def test_what_the_loop_captures_is_what_the_convention_says(vllm, family, data, n):
    ids = data.draw(
        st.one_of(
            st.lists(st.integers(-2, n + 2), min_size=1, max_size=5),
            st.lists(st.integers(0, n), min_size=1, max_size=4, unique=True).map(sorted),
            st.lists(st.integers(1, n), min_size=1, max_size=4, unique=True),
        )
    )
    chosen = convention_for("vllm", family, version=VERSION)
    peer = theirs(vllm, "captured", family, n, ids)
    agree(ours(lambda: chosen.captured(ids, n), n), peer)
    try:
        points = chosen.to_points(ids, n)
    except ConventionError:
        return
    assert boundaries(points, n) == peer
    assert len(peer) == len(ids)
    assert chosen.captured(ids, n).quirks == ()
    assert chosen.from_points(points, n) == ids


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7])
def test_the_default_layers(vllm, family, n):
    chosen = convention_for("vllm", family, version=VERSION)
    agree(ours(lambda: chosen.default(n), n), theirs(vllm, "default", family, n))


def test_a_target_without_the_interface(vllm):
    assert theirs(vllm, "captured", "gpt2", 3, [1]) == "AttributeError"
    with pytest.raises(ConventionError, match="have no EAGLE-3 interface"):
        convention_for("vllm", "gpt2", version=VERSION).captured([1], 3)


def test_the_tables_of_families(vllm):
    """Every model type that transformers knows, where vLLM's class can be imported."""
    groups = vllm("groups", vllm("model_types"))
    assert len(groups) > 200
    # Its published configs name vLLM's own class; transformers has another name for its own.
    assert groups.pop("kimi_k25") == "backend"
    for model_type, group in groups.items():
        name = convention_for("vllm", model_type, version=VERSION).name
        found = {"vllm.transformers": "backend", "vllm.none": "none", "vllm.none-0.32": "none"}
        assert found.get(name, "eagle3") == group, (model_type, name)


TOP = "eagle_aux_hidden_state_layer_ids"
ODD = (
    None,
    True,
    0,
    3,
    2.5,
    "",
    "2",
    {},
    {"layer_ids": [3]},
    [],
    [None],
    ["1", 2],
    [True, 4],
    [2.0, 3],
    [2.5],
    [[1]],
)
DRAFT = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}
METHODS = {"eagle3": "LlamaForCausalLMEagle3", "dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}


def ids(random, n):
    """Mostly ids of layers, often unordered, sometimes not a list."""
    if random.random() < 0.25:
        return random.choice(ODD)
    return [random.randint(-2, n + 2) if random.random() < 0.1 else random.randint(0, n) for _ in range(3)]


def keys(random, n):
    """Some of the keys that a runner looks at, alone or disagreeing."""
    found = {
        key: ids(random, n)
        for key in (TOP, "dspark_target_layer_ids", "target_layer_ids")
        if random.random() < 0.3
    }
    for outer, inner in (("dflash_config", "target_layer_ids"), ("eagle_config", TOP)):
        if random.random() < 0.6:
            found[outer] = {key: ids(random, n) for key in (inner, "layer_ids") if random.random() < 0.6}
            if random.random() < 0.2:
                found[outer]["use_aux_hidden_state"] = random.choice([True, False, None])
            if random.random() < 0.1:
                found[outer] = random.choice(ODD)
    return found


def raw_config(random, n):
    method = random.choice(sorted(METHODS))
    return {**DRAFT, "architectures": [METHODS[method]], **keys(random, n)}, method


def speculators_config(random, n):
    kind = random.choice(["eagle3", "peagle", "dflash", "dflash2", "dspark", "eagle3", "dflash", "mtp", None])
    config = {
        "architectures": ["x"],
        "speculators_config": {"algorithm": "x"},
        "speculators_model_type": kind,
        "transformer_layer_config": {
            **DRAFT,
            "model_type": random.choice(["llama", "qwen3", "llama", "gemma3_text"]),
            **(keys(random, n) if random.random() < 0.3 else {}),
        },
        **keys(random, n),
    }
    if random.random() < 0.8:
        config["mask_token_id"] = 3
    if random.random() < 0.8:
        config["aux_hidden_state_layer_ids"] = ids(random, n)
    return config, {"peagle": "eagle3", "dflash2": "dflash", "mtp": "eagle3", None: "eagle3"}.get(kind, kind)


@pytest.mark.parametrize("form", [raw_config, speculators_config])
@pytest.mark.parametrize(("runner", "reader"), [("v1", "vllm.v1"), ("v2", "vllm.v2-0.30")])
@settings(deadline=None, max_examples=600)
@given(seed=st.integers(0, 2**64), n=st.sampled_from([5, 7]))
def test_what_a_runner_reads(vllm, runner, reader, form, seed, n):
    """Drawn from a seed: what Hypothesis likes to draw hardly ever has two keys that disagree."""
    config, method = form(Random(seed), n)
    reading = registry().readers[reader].read(config, "llama", n)
    assert (reading.captured is None) == (reading.refusal is not None)
    if runner == "v1" and method == "dspark":
        assert reading.captured is None
        return
    peer = theirs(vllm, "read", runner, config, method, n)
    if reading.captured is None:
        assert isinstance(peer, str), (config, reading, peer)
        return
    mine = boundaries(reading.captured.points, n)
    assert mine == ([None] if peer is None else peer), (config, reading)


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from([TOP, "layer_ids", "target_layer_ids", "model_type"]), inner, max_size=3
        ),
    ),
    max_leaves=8,
)
NAMES = [
    *(TOP, "dspark_target_layer_ids", "target_layer_ids", "dflash_config", "eagle_config", "architectures"),
    *(
        "speculators_config",
        "speculators_model_type",
        "transformer_layer_config",
        "aux_hidden_state_layer_ids",
    ),
]


@settings(deadline=None, max_examples=500)
@given(
    config=st.dictionaries(st.sampled_from(NAMES), st.one_of(junk, st.sampled_from(["eagle3", "dspark"]))),
    family=st.sampled_from(["llama", "deepseek_v3", "glm_moe_dsa", "gpt2", "smollm3", "deepseek_v4", "x"]),
    n=st.integers(1, 9),
)
def test_every_config_is_answered_or_refused(config, family, n):
    for reader in registry().readers.values():
        if reader.library == "vllm":
            reading = reader.read(config, family, n)
            assert (reading.captured is None) == (reading.refusal is not None)
