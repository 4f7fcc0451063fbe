"""`explain` on heads that other libraries' own trainers wrote: what is right with them, and what is not."""

import pytest
import real_heads

from capture_hooks.interop.explain import ExplainOptions, agrees, explain_head

MEANT = ["post.0", "post.2", "post.5"]


def explained(name, **said):
    asked = ExplainOptions(target=str(real_heads.target()), **said)
    return explain_head(str(real_heads.head(name)), asked)


def checks(report, severity):
    return {(f.check, engine) for f in report.findings if f.severity == severity for engine in f.engines}


@pytest.mark.parametrize("name", ["specforge", "specforge-norm-output", "modelopt"])
def test_ids_of_a_raw_head_are_not_judged_until_somebody_says_who_wrote_them(name):
    library = real_heads.RECIPES[name].library
    unsaid = explained(name)
    assert unsaid.trained.by.startswith("cannot be known")
    assert {row.verdict.outcome for row in unsaid.rows} <= {"unknown", "fails"}
    assert not agrees(unsaid, ["vllm"])
    said = explained(name, written_for=library)
    assert [state.point for state in said.trained.inputs] == MEANT
    by = {row.engine: row for row in said.rows}
    assert by["vllm.v1"].verdict.how == ("every state is one layer earlier than trained",)
    assert "takes layers of its own" in by["vllm.v2"].verdict.how[0]
    assert by["vllm.v1"].instead == "eagle_aux_hidden_state_layer_ids = [1, 3, 6]"


def test_modelopts_traps_are_found_and_said():
    report = explained("modelopt", written_for="modelopt")
    assert ("writers.modelopt_norms", "vllm") in checks(report, "warning")
    assert ("writers.modelopt_ids", "vllm") in checks(report, "note")
    assert ("writers.modelopt_ids", "vllm") in checks(explained("modelopt"), "warning")


def test_specforges_norm_output_is_wrong_in_servers_where_it_is_written():
    written = explained("specforge-norm-output", written_for="specforge")
    assert ("norms.norm_output", "sglang") in checks(written, "wrong")
    assert ("norms.norm_output", "vllm") in checks(written, "wrong")
    left_out = explained("specforge", written_for="specforge")
    assert "norms.norm_output" not in {finding.check for finding in left_out.findings}


@pytest.mark.parametrize("name", ["speculators", "speculators-default"])
def test_a_speculators_head_says_itself_what_it_was_trained_on(name):
    report = explained(name)
    assert [state.point for state in report.trained.inputs] == MEANT
    assert agrees(report, ["vllm.v1", "vllm.v2"])
    assert ("architecture.layout", "sglang") in checks(report, "wrong")
