"""SpecForge's conventions and reader against SpecForge 0.2: what it hands to SGLang, and what it refuses."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer, PeerError

from capture_hooks.conventions import convention_for
from capture_hooks.errors import ConventionError
from capture_hooks.plugins import registry

FAMILIES = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma4_text", "gpt2"]
DRAFTS = {
    "eagle3": {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 8,
    },
}
EAGLE3 = "eagle_config.eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def specforge() -> Iterator[Peer]:
    peer = Peer("specforge", "specforge_ids")
    yield peer
    peer.close()


def told(specforge, strategy, draft, override, n):
    """What SGLang's setter is called with, or None where the run stops."""
    try:
        method, layers = specforge("resolved", strategy, draft, override, n)
    except PeerError:
        return None
    assert method == strategy
    return layers


def sglang(family, ids, n, key=EAGLE3):
    """What SGLang does then (``test_sglang_ids``), or None where it fails."""
    try:
        return convention_for("sglang", family, key, "0.5.14").captured(ids, n).points
    except ConventionError:
        return None


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=3),
    st.integers(0, 3),
    st.just({"a": 1}),
    st.just(["1", None, True]),
)
lists = st.one_of(
    st.lists(st.integers(0, 12), min_size=3, max_size=3, unique=True),
    st.lists(st.one_of(st.integers(-1, 12), st.just(True), st.just(2.0)), max_size=4),
)


@settings(deadline=None, max_examples=300)
@given(
    nested=st.one_of(
        junk, st.fixed_dictionaries({}, optional={"eagle_aux_hidden_state_layer_ids": st.one_of(lists, junk)})
    ),
    family=st.sampled_from(FAMILIES),
    n=st.integers(2, 12),
)
def test_what_a_run_reads(specforge, nested, family, n):
    config = {**DRAFTS["eagle3"], "eagle_config": nested}
    reading = registry().readers["specforge"].read(config, family, n)
    ids = told(specforge, "eagle3", config, None, n)
    captured = None if ids is None else sglang(family, ids, n)
    assert (reading.captured.points if reading.captured else None) == captured, reading
    assert reading.captured or reading.refusal


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(2, 12))
def test_a_runs_own_list(specforge, family, data, n):
    ids = data.draw(lists.filter(lambda ids: all(type(k) is int for k in ids)))
    chosen = convention_for("specforge", family)
    layers = told(specforge, "eagle3", DRAFTS["eagle3"], ids, n)
    try:
        captured = chosen.captured(ids, n)
    except ConventionError:
        assert layers is None or sglang(family, layers, n) is None
        return
    assert layers == ids
    assert captured.points == sglang(family, ids, n)
    if captured.quirks:
        return
    assert chosen.to_points(ids, n) == captured.points
    assert told(specforge, "eagle3", DRAFTS["eagle3"], chosen.from_points(captured.points, n), n) is not None
    assert chosen.to_points(chosen.from_points(captured.points, n), n) == captured.points


@settings(deadline=None, max_examples=100)
@given(
    nested=st.one_of(junk, st.fixed_dictionaries({}, optional={"target_layer_ids": st.one_of(lists, junk)})),
    n=st.integers(2, 12),
)
def test_what_a_run_reads_for_dflash(specforge, nested, n):
    config = {**DRAFTS["dflash"], "dflash_config": nested}
    reading = registry().readers["specforge"].read(config, "llama", n)
    ids = told(specforge, "dflash", config, None, n)
    captured = None if ids is None else sglang("llama", ids, n, "dflash_config.target_layer_ids")
    assert (reading.captured.points if reading.captured else None) == captured, reading
    assert reading.captured or reading.refusal
