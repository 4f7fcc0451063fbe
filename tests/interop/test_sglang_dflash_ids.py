"""SGLang's DFlash and DSpark conventions, and how it reads a draft's config, against its own code."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import PeerError
from sglang_asked import (
    DFLASH,
    DSPARK,
    agree,
    asked,
    boundaries,
    depths,
    id_lists,
    of,
    with_dflash,
)

from capture_hooks.conventions.readers import DFLASH as KEY
from capture_hooks.conventions.readers import block_layers, read_blocks
from capture_hooks.conventions.rules import Never
from capture_hooks.errors import ConventionError


@settings(deadline=None, max_examples=800)
@given(data=st.data())
def test_dflash_ids(data, sglang, sglang_versions, sglang_families) -> None:
    version = data.draw(st.sampled_from(with_dflash(sglang_versions)))
    family = data.draw(st.sampled_from(sorted(sglang_families)))
    ours = of(family, version, KEY)
    name = DSPARK if getattr(ours, "dspark_only", False) else DFLASH
    if not sglang("setter", version, family, name) or family == "inkling_mm_model":
        assert isinstance(ours, Never), f"{family} has no setter in {version}"
        return
    n = data.draw(depths)
    ids = data.draw(id_lists)
    if isinstance(ours, Never):  # qwen3_vl: the inner model has no setter
        with pytest.raises(PeerError, match="AttributeError"):
            sglang("capture", version, family, [0], n, name)
        return
    if name == DSPARK:  # its own reader lets the same lists through
        ids = sorted({number % n for number in ids})
    agree(sglang, ours, version, family, ids, n, name)


@given(n=st.integers(1, 99), draft_layers=st.integers(1, 8), data=st.data())
@settings(deadline=None)
def test_dflash_default(n, draft_layers, data, sglang, sglang_versions) -> None:
    version = data.draw(st.sampled_from(with_dflash(sglang_versions)))
    theirs, _ = asked(lambda: sglang("checked", version, None, n, draft_layers), PeerError)
    assert asked(lambda: block_layers(n, draft_layers), ConventionError)[0] == theirs


lists = st.one_of(
    id_lists, st.none(), st.just("12"), st.just({}), st.lists(st.sampled_from([1.5, True, "3", "x"]))
)


@settings(deadline=None, max_examples=800)
@given(data=st.data())
def test_configs_of_dflash_drafts(data, sglang, sglang_versions) -> None:
    """Which list a whole config gives, in which order of keys, and what of it reaches the setter."""
    version = data.draw(st.sampled_from(with_dflash(sglang_versions)))
    family = data.draw(st.sampled_from(["llama", "gpt_oss", "qwen3", "muse_glimmer"]))
    n = data.draw(depths)
    config = {"architectures": [data.draw(st.sampled_from(["DFlashDraftModel", "DFlash2DraftModel"]))]}
    config["num_hidden_layers"] = data.draw(st.integers(1, 5))
    config |= data.draw(st.fixed_dictionaries({}, optional={"target_layer_ids": lists}))
    nested = st.fixed_dictionaries({}, optional={"target_layer_ids": lists})
    config |= data.draw(st.fixed_dictionaries({}, optional={"dflash_config": st.none() | nested}))
    reading = read_blocks(config, family, n, version)
    if isinstance(of(family, version, KEY), Never):
        assert reading.refusal
        return
    reached, failure = asked(lambda: sglang("read_draft", version, config, family, n), PeerError)
    if reached is not None:
        reached, failure = asked(lambda: sglang("set_and_capture", version, family, reached, n), PeerError)
    assert (reading.refusal is None) == (failure is None), (version, family, n, config, reading, failure)
    if failure is None:
        assert boundaries(reading.captured.points, n) == reached, (version, family, n, config)
