"""The whole report: made of anything, the same after JSON, never at odds with conventions or own heads."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_hooks.conventions import BUILTIN
from capture_hooks.errors import CaptureHooksError, ConventionError, HeadError
from capture_hooks.heads.engines import statements
from capture_hooks.interop.explain import ExplainOptions, Known, Report, agrees, explain_head, explain_ids
from capture_hooks.interop.explain.trained import applying_to
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec, Point

ROOT = Path(__file__).parents[2]
FAMILIES = sorted({family for known in registry().conventions.values() for family in known.families})
families = st.sampled_from([*FAMILIES, "llama", "nobody's"])
libraries = sorted({known.library for known in registry().conventions.values()})
writers = st.sampled_from([None, *registry().conventions, *libraries])
layers = st.integers(1, 99)
flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_norm")


def ids_of(n):
    """Ids around the layers of a model."""
    return st.lists(st.integers(-2, n + 2), min_size=1, max_size=5)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), layers, families, writers)
@settings(deadline=None)
def test_any_ids_make_a_report_or_a_named_error(data, n, family, writer):
    asked = ExplainOptions(family=family, layers=n, written_for=writer)
    try:
        report = explain_ids(data.draw(ids_of(n)), asked)
    except CaptureHooksError:
        return
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report
    assert {row.engine for row in report.rows if row.asked == "ids"} <= {
        applying.convention.name for applying in applying_to(family, BUILTIN)
    }


@given(st.data(), layers, families, writers)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_config_makes_a_report_or_a_named_error(raw_head, tmp_path, data, n, family, writer):
    if not (tmp_path / "head").exists():
        raw_head()
    path = tmp_path / "head" / "config.json"
    right = json.loads(
        (tmp_path / "right.json").read_text() if (tmp_path / "right.json").exists() else path.read_text()
    )
    (tmp_path / "right.json").write_text(json.dumps(right))
    keys = [
        *right,
        *flags,
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "rope_parameters",
        "rope_scaling",
    ]
    keys += ["target_hidden_size", "num_aux_hidden_states", "transformer_layer_config", "quantization_config"]
    changed = data.draw(st.dictionaries(st.sampled_from(keys), anything, max_size=4))
    ids = st.one_of(ids_of(n), anything)
    if data.draw(st.booleans()):
        changed["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": data.draw(ids), "norm_output": True}
    if data.draw(st.booleans()):
        changed["eagle_aux_hidden_state_layer_ids"] = data.draw(ids)
    path.write_text(json.dumps(right | changed))
    try:
        report = explain_head(
            str(tmp_path / "head"), ExplainOptions(family=family, layers=n, written_for=writer)
        )
    except CaptureHooksError:
        return
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@given(st.data(), st.integers(7, 99), families)
@settings(deadline=None)
def test_a_verdict_is_the_equality_of_states(data, n, family):
    """Ids are the same to a library exactly where it captures what their convention means."""
    listed = data.draw(st.lists(st.integers(1, n - 2), min_size=1, max_size=4, unique=True).map(sorted))
    report = explain_ids(listed, ExplainOptions(family=family, layers=n, written_for="speculators"))
    if report.trained.inputs is None:
        return
    meant = [state.boundary for state in report.trained.inputs]
    for row in report.rows:
        if row.captured is not None:
            fed = [state.boundary for state in row.captured]
            assert (row.verdict.outcome == "same") == (fed == meant), row.engine
            assert (row.verdict.how == ()) == (fed == meant)
        if row.instead and not row.instead.startswith("no ids"):
            assert row.convention is None or BUILTIN[row.convention].key in row.instead


def test_a_convention_that_replaces_another_decides_for_ids_and_for_files(raw_head):
    """Given as known; without it the core's own decides."""
    one_deeper = dataclasses.replace(BUILTIN["vllm"], name="acme.vllm", overrides="vllm", reads="plus_one")
    known = Known({**BUILTIN, one_deeper.name: one_deeper})
    asked = ExplainOptions(family="llama", layers=12, written_for="vllm")
    place = raw_head(config={"eagle_aux_hidden_state_layer_ids": [3, 5, 8]})

    def captured(report):
        rows = [row for row in report.rows if row.convention in ("vllm", "acme.vllm")]
        return {(row.convention, tuple(state.boundary for state in row.captured)) for row in rows}

    for explain in (explain_ids, explain_head):
        subject = [3, 5, 8] if explain is explain_ids else place
        assert captured(explain(subject, asked)) == {("vllm", (3, 5, 8))}
        assert captured(explain(subject, asked, known)) == {("acme.vllm", (4, 6, 9))}


def test_the_story_of_the_same_three_integers():
    """Kimi-K2.5: the list means outputs to one family of models and inputs to the other, in one server."""
    by = {
        family: explain_ids([2, 30, 58], ExplainOptions(family=family, layers=61, written_for="sglang"))
        for family in ("llama", "deepseek_v2")
    }
    shown = {family: [state.point for state in report.trained.inputs] for family, report in by.items()}
    assert shown == {
        "llama": ["post.2", "post.30", "post.58"],
        "deepseek_v2": ["post.1", "post.29", "post.57"],
    }
    asked = ExplainOptions(
        family="deepseek_v2", layers=61, spec=CaptureSpec.parse("post.2, post.30, post.58")
    )
    report = explain_ids([2, 30, 58], asked)
    newest = [row for row in report.rows if row.library == "sglang" and row.newest]
    assert newest
    assert all(row.verdict.how == ("every state is one layer earlier than trained",) for row in newest)
    assert all("[3, 31, 59]" in row.instead for row in newest)
    assert not agrees(report, ["sglang"])
    patched = explain_ids([-1, 2, 30], asked)
    assert not agrees(patched, ["sglang"])


def test_without_a_writer_ids_are_shown_and_not_judged():
    report = explain_ids([2, 30, 58], ExplainOptions(family="llama", layers=61))
    assert report.trained.by.startswith("cannot be known")
    assert {row.verdict.outcome for row in report.rows} <= {"unknown", "fails"}
    by = {reading.convention: reading.inputs for reading in report.trained.candidates}
    assert [state.point for state in by["sglang.llama"]] == ["post.2", "post.30", "post.58"]
    assert [state.point for state in by["vllm"]] == ["post.1", "post.29", "post.57"]
    assert not agrees(report, ["sglang"])


def test_the_shipped_head_explains_itself():
    report = explain_head(str(ROOT / "examples" / "smollm2" / "head"))
    assert report.layout == "capture-hooks"
    assert report.target.n_layers == 30
    assert [f for f in report.findings if f.severity == "wrong" and "specforge" not in f.engines] == []
    for row in report.rows:
        if row.library in ("sglang", "vllm") and row.newest:
            assert row.verdict.outcome == "same", row


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 3], [0, -1, 1], []])
def test_a_capture_section_whose_order_cannot_be_is_a_fault(tmp_path, order):
    place = tmp_path / "head"
    shutil.copytree(ROOT / "examples" / "smollm2" / "head", place)
    document = json.loads((place / "config.json").read_text())
    document["capture"]["order"] = order
    (place / "config.json").write_text(json.dumps(document))
    report = explain_head(str(place))
    assert (
        report.trained.by == f"cannot be known: its capture.order {order} is no permutation of its 3 inputs"
    )
    assert "own.section" in {finding.check for finding in report.findings}
    assert not agrees(report, [])


def test_another_target_than_the_heads_is_said():
    head = str(ROOT / "examples" / "smollm2" / "head")
    report = explain_head(head, ExplainOptions(layers=24))
    assert "own.target" in {finding.check for finding in report.findings}
    assert not agrees(report, [])


FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EXTRA = {
    "layers.1.hidden_norm.weight": torch.ones(8),
    "layers.1.input_layernorm.weight": torch.ones(8),
    "fc.bias": torch.ones(8),
}
#: The rest of a second draft layer.
LAYER = {
    **{f"layers.1.self_attn.{name}_proj.weight": torch.ones(8, 8) for name in "qkvo"},
    **{f"layers.1.mlp.{name}_proj.weight": torch.ones(12, 8) for name in ("gate", "up")},
    "layers.1.mlp.down_proj.weight": torch.ones(8, 12),
    "layers.1.post_attention_layernorm.weight": torch.ones(8),
}


@given(
    st.fixed_dictionaries({name: st.booleans() for name in FIELDS}),
    st.sets(st.sampled_from(sorted(EXTRA))),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_own_heads_and_other_heads_are_judged_alike(raw_head, tmp_path, fields, extra, inputs):
    """`heads.engines` excludes an engine for what a head needs exactly where a check finds it wrong there."""
    if fields["norm_before_fc"] and fields["fc_norm"]:
        fields["fc_norm"] = False
    tensors = {name: EXTRA[name] for name in extra}
    two = any(name.startswith("layers.1.") for name in extra)
    tensors |= LAYER if two else {}
    norms = {"input_norm.weight": torch.ones(8 * inputs)} if fields["norm_before_fc"] else {}
    norms |= {f"fc_norm.{i}.weight": torch.ones(8) for i in range(inputs)} if fields["fc_norm"] else {}
    points = [Point.post(k) for k in (1, 5, 8, 9)[:inputs]]
    config = {**fields, "num_aux_hidden_states": inputs, "num_hidden_layers": 1 + two, "eagle_config": {}}
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8, 9][:inputs]}
    config["eagle_aux_hidden_state_layer_ids"] = [2, 6, 9, 10][:inputs]
    name = f"head-{len(list(tmp_path.iterdir()))}"
    head = raw_head("modelopt", config=config, tensors=tensors | norms, inputs=inputs, name=name)
    report = explain_head(head, ExplainOptions(family="llama", layers=12, written_for="sglang.llama"))
    held = tensors | {"fc.weight": torch.ones(8, 8 * inputs)}
    for statement in statements(points, 12, "llama", False, fields, held, "0"):
        if statement.engine not in ("sglang", "vllm"):
            continue
        wrong = [f for f in report.findings if f.severity == "wrong" and statement.engine in f.engines]
        seen_by = any(row.library == statement.engine and row.asked == "file" for row in report.rows)
        if inputs == 1 and not seen_by:
            continue
        assert bool(wrong) == (not statement.right), (statement, wrong)


def test_engines_are_named_by_library_reader_or_version():
    report = explain_ids([2, 30, 58], ExplainOptions(family="llama", layers=61, written_for="vllm"))
    assert agrees(report, ["vllm", "vllm==0.20.0", "speculators"])
    assert not agrees(report, ["vllm", "sglang"])
    with pytest.raises(ConventionError, match="0\\.0\\.1"):
        agrees(report, ["vllm==0.0.1"])
    with pytest.raises(ConventionError, match="known are"):
        agrees(report, ["acme"])


def test_a_document_of_another_form_is_refused():
    document = explain_ids([2], ExplainOptions(family="llama", layers=12)).to_json()
    assert Report.json_schema()["properties"].keys() == document.keys()
    with pytest.raises(HeadError, match="format"):
        Report.from_json({**document, "format": 2})
