"""`bind` on real SGLang models in their own process, against the Hugging Face models with the same weights.

One process per family, for SGLang loads one model per process; about 15 seconds each.  All families:
``python benchmarks/sglang_families.py``.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

WORKER = Path(__file__).with_name("sglang_capture_worker.py")
#: What each family is here for: its layout, and whether its lm_head is the embedding.
FAMILIES = {
    "llama": ("stream", False),
    "qwen3_moe": ("stream", False),  # experts; its own capture keeps flags
    "deepseek_v2": ("stream", False),  # latent attention; layers return a tuple
    "gemma3_text": ("pair", True),  # keyword arguments, norms around the sublayers, a scaled embedding
    "olmo2": ("plain", False),  # norms after the sublayers
}
#: float32, other orders of summation: a few units in the last place, summed over the layers.
SAME = 5e-6
#: What is not the same tensor differs by orders of magnitude more.
OTHER = 1e-2


@functools.cache
def measured(family):
    environment = {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGL_KERNEL_CPU_ATTENTION": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), family], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_boundary_is_that_of_the_hugging_face_model(family):
    report = measured(family)
    assert (report["layout"], report["tied"]) == FAMILIES[family]
    assert len(report["post"]) == 5
    assert max(report["post"]) < SAME
    assert report["final_norm"] < SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_stay_with_their_request_over_chunks_and_decode_steps(family):
    rows = measured(family)["rows"]
    assert rows["difference"] < SAME
    assert rows["requests"] == 3
    # 14 and 5 prompt tokens and 2 decoded ones each; the third came while the first two were half-way.
    assert rows["positions"] == [list(range(16)), list(range(7)), list(range(4))]
    assert rows["packed_order"] == [0] * 3 + [1] * 3 + [2] * 4 + [0] * 6 + [0] * 5 + [1] * 2 + [0, 1] * 2
    assert rows["decoded"] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_buffer_holds_the_same_rows(family):
    static = measured(family)["static"]
    assert static["equal"]
    assert static["shared"]
    assert static["positions"] == [*range(14), *range(5)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_captured_is_named(family):
    refusals = measured(family)["refusals"]
    assert "never fired" in refusals["outside"]
    assert "in:logits_processor" in refusals["outside"]
    assert "is one stage of a pipeline: model.layers.1 on other ranks" in refusals["pipeline"]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_the_anatomy_is_found_while_sglang_captures_itself(family):
    calls = [call for call in measured(family)["native"] if "error" not in call]
    assert calls
    assert all(call["layout"] == FAMILIES[family][0] for call in calls)


def test_gemma3_leaves_the_residual_out_of_its_own_capture():
    (call,) = measured("gemma3_text")["native"]
    assert all(gap > OTHER for _, gap in call["native"])
    assert call["ours"] < SAME


def test_llama_cannot_capture_its_last_layers_output_itself():
    inner, last = measured("llama")["native"]
    assert [k for k, _ in inner["native"]] == [1, 2]
    assert all(gap < SAME for _, gap in inner["native"])
    assert "error" in last
    assert last["ours"] < SAME  # post.3 among them, in the very forward that SGLang gave up


def test_qwen3_moe_keeps_the_layers_of_earlier_calls():
    first, second = measured("qwen3_moe")["native"]
    assert [k for k, _ in first["native"]] == [1]
    assert [k for k, _ in second["native"]] == [1, 2]  # asked for one
    assert max(first["ours"], second["ours"]) < SAME
