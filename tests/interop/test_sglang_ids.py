"""SGLang's EAGLE-3 conventions against its own setters and loops, in every version under ``build/sglang``.

The worker runs the setters and the tests of the capture loops from their source (`workers/sglang_source.py`);
`test_sglang_running` compares with models that really run.
"""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peer import Peer, PeerError
from sglang_asked import (
    DFLASH,
    DSPARK,
    EAGLE3,
    agree,
    asked,
    boundaries,
    depths,
    has_rule,
    id_lists,
    of,
)
from sglang_versions import VERSIONS

from capture_hooks.conventions.lookup import rows
from capture_hooks.conventions.readers import DFLASH as KEY
from capture_hooks.conventions.rules import Never, Sglang
from capture_hooks.errors import ConventionError

#: Served with a setter and not a target of their own: drafts, and another framework's models.
DRAFTS = ("NextN", "MTP", "Eagle", "Eagle3", "AssistantForCausalLM")
NO_TARGETS = {"MindSporeForCausalLM", "EmbeddingGemmaModel", "Lfm2BidirectionalModel"}
#: Families whose ``model_type`` is not known here: their architectures inherit from one that is.
INHERIT = {
    "TeleFLMForCausalLM": "llama",
    "MistralLarge3ForCausalLM": "deepseek_v3",
    "InternS1ProForConditionalGeneration": "qwen3_vl_moe",
    "BailingMoeForCausalLM": "bailing_moe",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "MiMoV2ForCausalLM": "mimo_v2_flash",
    "MuseGlimmerForConditionalGeneration": "muse_glimmer",
    "MuseSparkForConditionalGeneration": "muse_spark",
    "NemotronHPuzzleForCausalLM": "nemotron_h",
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron_h",
    "NemotronH_Nano_VL_V2": "nemotron_h",
    "NemotronH_Omni_Reasoning_V3": "nemotron_h",
}
#: What they capture is no boundary, and their loops are not run here.
STREAMS = {
    "DeepseekV4ForCausalLM",
    "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "NanbeigeForCausalLM",
    "Qwen4ExpForConditionalGeneration",
}


def test_every_version_at_which_a_rule_changed_is_compared(sglang_versions: list[str]) -> None:
    if missing := set(VERSIONS) - set(sglang_versions):
        pytest.skip(f"not compared, for their sources are not here (make sglang-versions): {sorted(missing)}")


@settings(deadline=None, max_examples=1500)
@given(data=st.data())
def test_eagle3_ids(data, sglang, sglang_versions, sglang_families) -> None:
    version = data.draw(st.sampled_from(sglang_versions))
    family = data.draw(st.sampled_from(sorted(sglang_families)))
    ours = of(family, version)
    if not sglang("setter", version, family, EAGLE3):
        assert isinstance(ours, Never), f"{family} has no setter in {version}"
        return
    assert has_rule(ours), f"{family} has a setter in {version}, and we know {ours.name}"
    n = data.draw(depths)
    ids = data.draw(id_lists)
    if not getattr(ours, "graphs_take_default", False):
        agree(sglang, ours, version, family, ids, n, EAGLE3)
        return
    # What eager forwards capture; the graphs are another test's.
    captured, _ = asked(lambda: ours.captured(ids, n), ConventionError)
    found = boundaries(captured.points, n) if captured else None
    assert eager(sglang, version, family, ids, n) == found, (version, family, ids, n)


def eager(sglang: Peer, version: str, family: str, ids: list[int], n: int) -> list[int] | None:
    return asked(lambda: sglang("capture", version, family, ids, n, EAGLE3), PeerError)[0]


def test_eagle3_defaults(sglang, sglang_versions, sglang_families) -> None:
    for version in sglang_versions:
        for family in sglang_families:
            ours = of(family, version)
            if sglang("setter", version, family, EAGLE3) and isinstance(ours, Sglang):
                for n in (*range(1, 10), 36, 61):
                    agree(sglang, ours, version, family, None, n, EAGLE3)


@settings(deadline=None, max_examples=600)
@given(data=st.data())
def test_points_reach_sglang_as_ids(data, sglang, sglang_versions, sglang_families) -> None:
    """Points -> ids -> what SGLang captures is the identity."""
    version = data.draw(st.sampled_from(sglang_versions))
    family = data.draw(st.sampled_from(sorted(sglang_families)))
    n = data.draw(depths)
    ours = of(family, version)
    wanted = sorted(data.draw(st.sets(st.integers(0, n), min_size=1, max_size=4)))
    if isinstance(ours, Never):
        return
    points = tuple(ours.point(k, n) for k in wanted)
    try:
        ids = ours.from_points(points, n)
    except ConventionError:
        return
    assert ours.to_points(ids, n) == points
    assert sglang("capture", version, family, ids, n, EAGLE3) == wanted


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_points_are_refused_only_where_no_ids_would_do(n, sglang, sglang_versions, sglang_families) -> None:
    """In the newest version: whatever some ascending list of ids captures, we find such a list."""
    version = sglang_versions[-1]
    for family in sorted(sglang_families):
        ours = of(family, version)
        if isinstance(ours, Never):
            continue
        possible: set[tuple[int, ...]] = set()
        for ids in (list(c) for k in (1, 2, 3) for c in combinations(range(n + 2), k)):
            found = eager(sglang, version, family, ids, n)
            if found is not None and len(found) == len(ids):
                possible.add(tuple(found))
        for wanted in (c for k in (1, 2, 3) for c in combinations(range(n + 1), k)):
            try:
                ours.from_points(tuple(ours.point(k, n) for k in wanted), n)
            except ConventionError:
                assert wanted not in possible, (family, wanted)
            else:
                assert wanted in possible, (family, wanted)


def test_every_served_model_with_a_setter_is_known(sglang, sglang_versions, sglang_families) -> None:
    known = {cls: family for family, (_, cls) in sglang_families.items()} | INHERIT
    for version in sglang_versions:
        for name, key in ((EAGLE3, None), (DFLASH, KEY), (DSPARK, KEY)):
            for cls in sglang("served", version, name):
                if cls.endswith(DRAFTS) or cls in NO_TARGETS | STREAMS:
                    continue
                assert cls in known, f"{cls} of {version} has {name}, and no family is known for it"
                if known[cls] not in ("inkling_mm_model", "qwen3_vl", "cosmos3_omni"):
                    assert has_rule(of(known[cls], version, key)), (version, cls, name)


def test_every_family_of_ours_is_one_of_theirs(sglang_families) -> None:
    inner = {"qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text", "glm5_next_text", "muse_spark_text"}
    streams = {"deepseek_v4", "kimi_k3", "nanbeige", "qwen4_exp"}
    for convention in (row for row in rows() if row.library == "sglang"):
        assert set(convention.families) <= set(sglang_families) | inner | streams, convention.name


def test_up_to_0_5_10_graphs_take_the_default(sglang, sglang_versions) -> None:
    for version in sglang_versions:
        assert sglang("graphs_take_default", version) == of("llama", version).graphs_take_default
        ours = of("llama", version)
        quirks = ours.captured([0, 2], 9).quirks
        assert any("CUDA graphs" in quirk for quirk in quirks) == ours.graphs_take_default
        assert not ours.captured([1, 3, 5], 9).quirks  # the default's own ids
