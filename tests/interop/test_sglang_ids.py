"""SGLang's conventions against SGLang's own setters and loops, in every version under ``build/sglang``.

The worker runs the setters and the tests of the capture loops from their source (`workers/sglang_source.py`);
`test_sglang_running` compares with models that really run.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks import Point
from capture_hooks.conventions import Convention, convention_for
from capture_hooks.conventions.sglang import CONVENTIONS
from capture_hooks.conventions.sglang.dflash import KEY, default_layers
from capture_hooks.conventions.sglang.dflash_reader import read_draft
from capture_hooks.conventions.sglang.eagle3 import Eagle3, Never
from capture_hooks.errors import ConventionError
from tests.interop.peer import Peer, PeerError

EAGLE3, DFLASH, DSPARK = (f"set_{name}_layers_to_capture" for name in ("eagle3", "dflash", "dspark"))
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
#: How SGLang fails, and the word in our refusal.
FAILURES = {
    "IndexError": ("IndexError",),
    "TypeError": ("TypeError",),
    "ValueError": ("ValueError", "fails to unpack"),
    "RuntimeError": ("RuntimeError",),
    "AssertionError": ("RuntimeError",),  # what it was up to 0.5.19
}
depths = st.integers(1, 9)
#: Mostly plausible lists, and everything else as well.
id_lists = st.one_of(
    st.sets(st.integers(0, 9), min_size=1, max_size=4).map(sorted),
    st.lists(st.integers(-3, 11), min_size=1, max_size=4),
)


@pytest.fixture(scope="module")
def sglang() -> Iterator[Peer]:
    peer = Peer("sglang", "sglang_source")
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def versions(sglang: Peer) -> list[str]:
    return list(sglang("versions"))


@pytest.fixture(scope="module")
def families(sglang: Peer) -> dict[str, list[str]]:
    return dict(sglang("families"))


def boundaries(points: Sequence[Point], n: int) -> list[int]:
    """Gemma3's outputs of norms stand for the boundaries at which its loop took them."""
    return [
        int(point.module.split(".")[-2]) + 1 if point.module else point.resolve(n).boundary
        for point in points
    ]


def of(family: str, version: str, key: str | None = None) -> Convention:
    return convention_for("sglang", family, key, version)


def agree(sglang: Peer, ours: Convention, version: str, family: str, ids, n: int, name: str) -> None:
    """What SGLang captures, or how it fails, is what we say."""
    case = f"{ours.name} for {family} in {version}: {ids} of {n} layers"
    theirs, failure = asked(lambda: sglang("capture", version, family, ids, n, name), PeerError)
    captured, refusal = asked(
        lambda: ours.default(n) if ids is None else ours.captured(ids, n), ConventionError
    )
    assert (failure is None) == (refusal is None), (
        f"{case}: {failure or theirs}, we say {refusal or captured}"
    )
    if failure:
        why = FAILURES[failure.kind]
        assert isinstance(ours, Never) or any(word in str(refusal) for word in why), f"{case}: {failure}"
    elif not theirs:
        assert captured.points == (Point("final_norm"),), case
        assert captured.quirks, case
    else:
        assert boundaries(captured.points, n) == theirs, case
        if ids is not None and not captured.quirks:
            assert len(theirs) == len(ids), f"{case}: a column was dropped silently"
            assert ours.to_points(ids, n) == captured.points, case


def asked(question, refusal):
    """The answer, or the refusal."""
    try:
        return question(), None
    except refusal as error:
        return None, error


def has_rule(convention: Convention) -> bool:
    return not isinstance(convention, Never) or "fills a list" in convention.why


@settings(deadline=None, max_examples=1500)
@given(data=st.data())
def test_eagle3_ids(data, sglang, versions, families) -> None:
    version = data.draw(st.sampled_from(versions))
    family = data.draw(st.sampled_from(sorted(families)))
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


def with_dflash(versions: list[str]) -> list[str]:
    return [version for version in versions if not version.startswith(("0.5.9", "0.5.10"))]


def test_eagle3_defaults(sglang, versions, families) -> None:
    for version in versions:
        for family in families:
            ours = of(family, version)
            if sglang("setter", version, family, EAGLE3) and isinstance(ours, Eagle3):
                for n in (*range(1, 10), 36, 61):
                    agree(sglang, ours, version, family, None, n, EAGLE3)


@settings(deadline=None, max_examples=800)
@given(data=st.data())
def test_dflash_ids(data, sglang, versions, families) -> None:
    version = data.draw(
        st.sampled_from([v for v in versions if v not in ("0.5.9", "0.5.10", "0.5.10.post1")])
    )
    family = data.draw(st.sampled_from(sorted(families)))
    ours = of(family, version, KEY)
    name = DSPARK if ours.name.startswith("sglang.dspark") else DFLASH
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
def test_dflash_default(n, draft_layers, data, sglang, versions) -> None:
    version = data.draw(st.sampled_from(with_dflash(versions)))
    theirs, _ = asked(lambda: sglang("checked", version, None, n, draft_layers), PeerError)
    assert asked(lambda: default_layers(n, draft_layers), ConventionError)[0] == theirs


lists = st.one_of(
    id_lists, st.none(), st.just("12"), st.just({}), st.lists(st.sampled_from([1.5, True, "3", "x"]))
)


@settings(deadline=None, max_examples=800)
@given(data=st.data())
def test_configs_of_dflash_drafts(data, sglang, versions) -> None:
    """Which list a whole config gives, in which order of keys, and what of it reaches the setter."""
    version = data.draw(st.sampled_from(with_dflash(versions)))
    family = data.draw(st.sampled_from(["llama", "gpt_oss", "qwen3", "muse_glimmer"]))
    n = data.draw(depths)
    config = {"architectures": [data.draw(st.sampled_from(["DFlashDraftModel", "DFlash2DraftModel"]))]}
    config["num_hidden_layers"] = data.draw(st.integers(1, 5))
    config |= data.draw(st.fixed_dictionaries({}, optional={"target_layer_ids": lists}))
    nested = st.fixed_dictionaries({}, optional={"target_layer_ids": lists})
    config |= data.draw(st.fixed_dictionaries({}, optional={"dflash_config": st.none() | nested}))
    reading = read_draft(config, family, n, version)
    if isinstance(of(family, version, KEY), Never):
        assert reading.refusal
        return
    reached, failure = asked(lambda: sglang("read_draft", version, config, family, n), PeerError)
    if reached is not None:
        reached, failure = asked(lambda: sglang("set_and_capture", version, family, reached, n), PeerError)
    assert (reading.refusal is None) == (failure is None), (version, family, n, config, reading, failure)
    if failure is None:
        assert boundaries(reading.captured.points, n) == reached, (version, family, n, config)


@settings(deadline=None, max_examples=600)
@given(data=st.data())
def test_points_reach_sglang_as_ids(data, sglang, versions, families) -> None:
    """Points -> ids -> what SGLang captures is the identity."""
    version = data.draw(st.sampled_from(versions))
    family = data.draw(st.sampled_from(sorted(families)))
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
def test_points_are_refused_only_where_no_ids_would_do(n, sglang, versions, families) -> None:
    """In the newest version: whatever some ascending list of ids captures, we find such a list."""
    version = versions[-1]
    for family in sorted(families):
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


def test_every_served_model_with_a_setter_is_known(sglang, versions, families) -> None:
    known = {cls: family for family, (_, cls) in families.items()} | INHERIT
    for version in versions:
        for name, key in ((EAGLE3, None), (DFLASH, KEY), (DSPARK, KEY)):
            for cls in sglang("served", version, name):
                if cls.endswith(DRAFTS) or cls in NO_TARGETS | STREAMS:
                    continue
                assert cls in known, f"{cls} of {version} has {name}, and no family is known for it"
                if known[cls] not in ("inkling_mm_model", "qwen3_vl", "cosmos3_omni"):
                    assert has_rule(of(known[cls], version, key)), (version, cls, name)


def test_every_family_of_ours_is_one_of_theirs(families) -> None:
    inner = {"qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text", "glm5_next_text", "muse_spark_text"}
    streams = {"deepseek_v4", "kimi_k3", "nanbeige", "qwen4_exp"}
    for convention in CONVENTIONS:
        assert set(convention.families) <= set(families) | inner | streams, convention.name


def test_up_to_0_5_10_graphs_take_the_default(sglang, versions) -> None:
    for version in versions:
        assert sglang("graphs_take_default", version) == of("llama", version).graphs_take_default
        ours = of("llama", version)
        quirks = ours.captured([0, 2], 9).quirks
        assert any("CUDA graphs" in quirk for quirk in quirks) == ours.graphs_take_default
        assert not ours.captured([1, 3, 5], 9).quirks  # the default's own ids
