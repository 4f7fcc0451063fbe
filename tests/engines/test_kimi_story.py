"""The Kimi-K2.5 story of ``examples/kimi_story``, chapters (a) to (d), told once by real SGLang."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

STORY = Path(__file__).parents[2] / "examples" / "kimi_story" / "story.py"
#: float32 through 58 layers, in another order of summation.
SAME = 1e-5
#: The nearest of the other boundaries is further than this from every slot.
OTHER = 0.05


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What the story found, and what it printed."""
    kept = tmp_path_factory.mktemp("story") / "found.json"
    # A setting of the caller's would reach servers that are to have none.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CAPTURE_HOOKS_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, STORY, "--json", kept], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(kept.read_text()), done.stdout


@pytest.mark.parametrize(
    ("run", "boundaries"),
    [
        ("a", [2, 30, 58]),
        ("b", [3, 31, 59]),
        ("b, told", [3, 31, 59]),
        ("c, llama", [0, 3, 31]),
        ("d, llama", [3, 31, 59]),
        ("d, first is 1", [2, 31, 59]),
        ("d, first is 1, llama", [2, 31, 59]),
    ],
)
def test_each_slot_is_one_boundary_of_the_hugging_face_model_and_no_other(told, run, boundaries):
    found = told[0][run]
    assert found["error"] == ""
    assert found["boundaries"] == boundaries
    assert max(found["differences"]) <= SAME
    assert min(found["next"]) >= OTHER


def test_only_the_plugin_reports(told):
    found = told[0]
    assert {run for run in found if "report" in found[run]} == {"b", "b, told", "c, plugin"}
    report = found["b"]["report"]
    assert (report["points"], report["boundaries"]) == (["post.2", "post.30", "post.58"], [3, 31, 59])
    assert (report["mechanism"], report["verdict"]) == ("native", "matches")
    assert [path.split(":")[0] for path in report["message"].splitlines()] == [
        "extend",
        "chunked extend",
        "target verify",
    ]
    # No section, so no witness: what is captured is what the setting says, and nobody vouches for it.
    assert found["b, told"]["report"]["verdict"] == "unverified"
    assert found["b, told"]["report"]["source"] == "CAPTURE_HOOKS_SPEC"


def test_the_wrong_fix_stops_stock_deepseek_at_the_first_forward(told):
    assert told[0]["c, deepseek_v2"] == {
        "error": "RuntimeError: captured 2 of 3 aux hidden states",
        "boundaries": [],
    }


def test_the_wrong_fix_is_refused_with_every_slot_named(told):
    run = told[0]["c, plugin"]
    for slot, (truth, held) in enumerate(
        [("post.2", "embed"), ("post.30", "post.2"), ("post.58", "post.30")]
    ):
        assert f"slot {slot} should hold {truth} and holds {held}, " in run["error"]
        assert f"where this model's {truth} is " in run["error"]
    assert run["boundaries"] == []
    assert run["report"]["verdict"] == "mismatch"


def test_the_table_and_the_claims_are_printed(told):
    printed = told[1]
    table = [line.split() for line in printed.splitlines() if line.startswith("      [")]
    assert [" ".join(row) for row in table] == [
        "[2, 30, 58] pre.2, pre.30, pre.58 post.2, post.30, post.58",
        "[1, 30, 58] post.1, post.30, post.58 post.1, post.30, post.58",
        "[-1, 2, 30] stops embed, post.2, post.30",
    ]
    assert printed.count("  => ") == 8
    assert "no longer so" not in printed
