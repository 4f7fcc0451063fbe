"""The report in one sentence: it says *right* exactly where the report does, and names what is fed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.errors import CaptureHooksError
from capture_hooks.interop.explain import (
    ExplainOptions,
    agrees,
    explain_dump,
    explain_head,
    explain_ids,
    summary,
)
from capture_hooks.interop.explain.summary import slots
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec, Point

CONVENTIONS = registry().conventions
FAMILIES = sorted({family for known in CONVENTIONS.values() for family in known.families})
LIBRARIES = sorted({known.library for known in CONVENTIONS.values()})
families = st.sampled_from([*FAMILIES, "llama", "nobody's"])
writers = st.sampled_from([None, *CONVENTIONS, *LIBRARIES])
engines = st.lists(st.sampled_from(["sglang", "vllm", "specforge", "vllm==0.20.0"]), max_size=3, unique=True)
NAMES = {"sglang": "SGLang", "vllm": "vLLM", "specforge": "SpecForge"}
KIMI = {"family": "deepseek_v2", "layers": 61}


def judged(document, engine):
    """What the JSON says of an engine, and what it will feed."""
    name, _, version = engine.partition("==")
    rows = [row for row in document["rows"] if row["library"] == name]
    rows = [row for row in rows if row["asked"] == "ids"] or rows
    rows = [row for row in rows if row["newest"]] if not version else rows
    concerned = {name, *(row["engine"] for row in rows)}
    wrong = [finding["engines"] for finding in document["findings"] if finding["severity"] == "wrong"]
    outcomes = {row["verdict"]["outcome"] for row in rows}
    if any(not named or concerned & set(named) for named in wrong) or outcomes & {"differs", "fails"}:
        return "wrong", rows
    return "right" if outcomes == {"same"} else "unknown", rows


@given(st.data(), st.integers(1, 99), families, writers, engines)
@settings(deadline=None, max_examples=150)
def test_the_sentence_says_right_exactly_where_the_report_does(data, n, family, writer, wanted):
    ids = data.draw(st.lists(st.integers(-2, n + 2), min_size=1, max_size=9))
    trained = data.draw(st.lists(st.integers(0, n - 1), max_size=4, unique=True))
    spec = CaptureSpec(tuple(map(Point.post, trained))) if trained else None
    try:
        report = explain_ids(ids, ExplainOptions(family=family, layers=n, written_for=writer, spec=spec))
        found = summary(report, wanted)
    except CaptureHooksError:
        return
    shown = wanted or [name for name in ("sglang", "vllm") if any(r.library == name for r in report.rows)]
    if not shown or len({engine.partition("==")[0] for engine in shown}) < len(shown):
        return
    document = report.to_json()
    lead = found.sentence.partition(":")[0].lower()
    assert found.right == agrees(report, shown)
    assert (lead == "right") == found.right
    for engine in shown:
        if engine.endswith("0.20.0"):
            continue  # an earlier version: its rows are chosen by their ranges, as the exit code's are
        word, rows = judged(document, engine)
        words = [part for part in lead.split(", ") if NAMES[engine].lower() in part] or [lead]
        assert [part.split(" ")[0] for part in words] == [word], (found.sentence, engine)
        for row in rows:
            fed = [state["point"] for state in row["captured"] or ()]
            assert ", ".join(fed[:6]) in found.sentence


@given(st.data(), st.integers(7, 99), families)
@settings(deadline=None)
def test_a_slot_is_right_exactly_where_its_state_is(data, n, family):
    some = st.lists(st.integers(1, n - 2), min_size=1, max_size=4, unique=True)
    ids, trained = data.draw(some), map(Point.post, data.draw(some))
    try:
        report = explain_ids(ids, ExplainOptions(family=family, layers=n, spec=CaptureSpec(tuple(trained))))
    except CaptureHooksError:
        return
    for row in report.rows:
        found = slots(row, report.trained.inputs)
        if row.captured is None:
            assert found == ()
            continue
        fed = [state.boundary for state in row.captured]
        meant = [state.boundary for state in report.trained.inputs]
        padded = [*fed, *[None] * (len(meant) - len(fed))]
        assert [slot.right for slot in found] == [
            index < len(meant) and boundary == meant[index] for index, boundary in enumerate(padded)
        ]


@pytest.mark.parametrize(
    ("asked", "engines", "words"),
    [
        ({}, [], ["Unknown: given these ids, SGLang 0.5.23 and vLLM 0.33.0", "do not say who wrote them"]),
        ({"written_for": "sglang"}, [], ["Right: ", "which is what the head was trained on."]),
        (
            {"written_for": "modelopt"},
            [],
            ["Wrong: ", "but the head was trained on post.2, post.30, post.58"],
        ),
        (
            {"written_for": "modelopt"},
            ["vllm", "sglang==0.5.12"],
            [
                "Wrong for vLLM, right for SGLang: ",
                "vLLM 0.33.0 will feed post.1, post.29, post.57, which is not",
            ],
        ),
        (
            {"written_for": "modelopt"},
            ["sglang==0.5.12", "sglang"],
            ["Right for SGLang 0.5.12, wrong for SGLang 0.5.23: "],
        ),
        ({"spec": CaptureSpec.parse("embed, post.2, post.30")}, [], ["trained on embed, post.2, post.30."]),
    ],
)
def test_the_sentence_for_the_same_three_integers(asked, engines, words):
    found = summary(explain_ids([2, 30, 58], ExplainOptions(**KIMI, **asked)), engines)
    for word in words:
        assert word in found.sentence


def test_the_sentence_where_the_target_is_not_known():
    found = summary(explain_ids([2, 30, 58], ExplainOptions()))
    assert not found.right
    assert found.sentence == (
        "Unknown: what engines feed cannot be known without the target; give --target, or --family and "
        "--layers."
    )


def test_runners_that_do_not_do_the_same_are_told_apart(raw_head):
    asked = ExplainOptions(family="llama", layers=12, written_for="sglang")
    found = summary(explain_head(raw_head(nested=[1, 5, 8]), asked))
    assert found.sentence.startswith("Right for SGLang and vLLM (v2), wrong for vLLM (v1): ")
    assert [line.name for line in found.lines] == ["SGLang 0.5.23", "vLLM 0.33.0 (v1)", "vLLM 0.33.0 (v2)"]


def test_right_states_with_a_fault_beside_them_are_not_right(raw_head):
    asked = ExplainOptions(family="llama", layers=12, written_for="sglang")
    report = explain_head(raw_head(nested=[1, 5, 8], config={"tie_word_embeddings": True}), asked)
    found = summary(report, ["sglang"])
    assert [finding.check for finding in found.faults] == ["weights.tied"]
    assert found.sentence.startswith("Wrong: SGLang 0.5.23 will feed post.1, post.5, post.8, which is what")
    assert "the fault below keeps SGLang 0.5.23 from serving the head as it was trained" in found.sentence
    assert not agrees(report, ["sglang"])
    assert summary(report, ["vllm.v2"]).right


def test_what_is_wrong_for_two_engines_alike_is_one_fault(raw_head):
    asked = ExplainOptions(family="llama", layers=12, written_for="sglang")
    report = explain_head(raw_head(nested=[1, 5, 8], config={"hidden_act": "gelu"}), asked)
    assert len([f for f in report.findings if f.check == "config.hidden_act"]) == 2
    (fault,) = [f for f in summary(report).faults if f.check == "config.hidden_act"]
    assert fault.engines == ("sglang", "vllm")
    assert summary(report, ["vllm"]).faults[0].engines == ("vllm",)


def test_a_dump_says_what_to_write(dump_of_ours):
    found = summary(explain_dump(dump_of_ours))
    assert found.sentence == (
        "Right: told the ids below, SGLang 0.5.23 and vLLM 0.33.0 will feed post.0, post.2, which is what "
        "the dump holds."
    )
    assert [line.row.ids for line in found.lines] == [(0, 2), (1, 3)]
