"""The plugin inside real SGLang schedulers: what is captured, what reaches the head, what is refused."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.heads import make_witness, readout_of, save_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

HERE = Path(__file__).parent
SEQUENCES = [[5, 9, 20, 33, 77, 101, 60, 7, 3, 90, 41, 12], [8, 100, 3, 17, 50, 2, 9, 44]]
WITNESS = [list(range(5, 40)), list(range(90, 120))]
LAYERS = 8


class Schedulers:
    """A process that has SGLang imported and forks for each case."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, HERE / "scheduler_server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def run(self, environment=None, sequences=(), out=None, **arguments):
        case = {
            "arguments": arguments,
            "environment": environment or {},
            "sequences": list(sequences),
            "out": str(out) if out else None,
        }
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def schedulers():
    running = Schedulers()
    yield running
    running.close()


def save_a_head(model, spec, directory):
    """A random head for ``model``: what it drafts does not matter here, what it is fed does."""
    spec = CaptureSpec.parse(spec)
    anatomy = find_anatomy(model)
    provider = registry().heads["eagle3"]
    torch.manual_seed(1)
    head = provider.create(
        provider.config_type(),
        spec,
        anatomy,
        readout_of(anatomy, spec),
        torch.arange(0, anatomy.vocab_size, 2),
    )
    save_head(head, directory, model=model, witness=make_witness(model, head.spec, WITNESS))


def drafting(target, head, branches=1):
    return {
        "model_path": str(target),
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(head),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": branches,
        "speculative_num_draft_tokens": 4 if branches == 1 else 6,
    }


def true_states(model, points):
    """[T, K*H] of each sequence, from transformers."""
    found = []
    for tokens in SEQUENCES:
        with torch.no_grad(), bind(model, ", ".join(points)) as capture:
            model(torch.tensor([tokens]))
        found.append(capture.states.packed)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = tiny.llama(num_hidden_layers=LAYERS).float()
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder / "target")
    return model, folder


@pytest.fixture(scope="module")
def head(llama):
    model, folder = llama
    save_a_head(model, "post.1, post.3, post.5", folder / "head")
    return folder / "head"


def assert_delivered(answer, model, points, out):
    """Every row of every path equals transformers' states at ``points``."""
    assert "error" not in answer, answer["error"]
    stored = load_file(out)
    for number, truth in enumerate(true_states(model, points)):
        scale = truth.abs().max()
        for path, rows in (("extend", truth), ("chunked", truth), ("verify", truth[1:])):
            assert stored[f"{path}.{number}"].shape == rows.shape, path
            assert (stored[f"{path}.{number}"] - rows).abs().max() <= 1e-4 * scale, (path, number)


@pytest.mark.parametrize(
    ("spec", "mechanism"),
    [
        ("post.1, post.3, post.5", "native"),
        ("embed, pre.2, post.6", "native"),
        ("post.0, post.7", "hooks"),
        ("embed, post.3, final_norm", "hooks"),
        ("post.2", "native"),
    ],
)
def test_a_heads_points_reach_it_through_every_path(schedulers, llama, tmp_path, spec, mechanism):
    model, folder = llama
    save_a_head(model, spec, tmp_path / "head")
    answer = schedulers.run(
        sequences=SEQUENCES, out=tmp_path / "out", **drafting(folder / "target", tmp_path / "head")
    )
    points = spec.split(", ")
    assert_delivered(answer, model, points, tmp_path / "out")
    (report,) = answer["reports"]
    assert (report["points"], report["mechanism"], report["verdict"]) == (points, mechanism, "matches")
    for path in ("extend", "chunked extend", "target verify"):
        assert f"{path}: matches" in report["message"]


@pytest.mark.parametrize(
    ("family", "spec", "mechanism"),
    [
        ("gemma3_text", "post.1, post.3", "hooks"),  # its own capture leaves the residual out
        ("deepseek_v2", "pre.1, post.3, final_norm", "hooks"),
        ("deepseek_v2", "post.0, post.2", "native"),
        ("qwen3_moe", "post.0, post.2", "hooks"),  # its own never clears the layers it marked
        ("olmo2", "embed, post.2", "hooks"),  # it has none, and lends no embedding
    ],
)
def test_any_family_is_served(schedulers, tmp_path, family, spec, mechanism):
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    import sglang_families

    model = sglang_families.build(family, str(tmp_path / "target"))
    save_a_head(model, spec, tmp_path / "head")
    answer = schedulers.run(
        sequences=SEQUENCES, out=tmp_path / "out", **drafting(tmp_path / "target", tmp_path / "head")
    )
    assert_delivered(answer, model, spec.split(", "), tmp_path / "out")
    (report,) = answer["reports"]
    assert (report["mechanism"], report["verdict"]) == (mechanism, "matches")


def test_a_tree_is_served_as_a_chain_is(schedulers, llama, head, tmp_path):
    model, folder = llama
    answer = schedulers.run(
        sequences=SEQUENCES, out=tmp_path / "out", **drafting(folder / "target", head, branches=2)
    )
    assert_delivered(answer, model, ["post.1", "post.3", "post.5"], tmp_path / "out")


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ("pre.1, pre.3, pre.5", {0: "post.0", 1: "post.2", 2: "post.4"}),
        ("embed, post.1, post.3", {0: "embed", 1: "post.1", 2: "post.3"}),
        ("post.5, post.3, post.1", {0: "post.5", 2: "post.1"}),
        ("post.1, post.3, final_norm", {2: "final_norm"}),
    ],
)
def test_another_wiring_is_refused_and_every_wrong_slot_is_named(schedulers, llama, head, spec, wrong):
    answer = schedulers.run({"CAPTURE_HOOKS_SPEC": spec}, **drafting(llama[1] / "target", head))
    truth = ["post.1", "post.3", "post.5"]
    assert answer["error"].startswith("EngineError: this server would feed the head other states")
    for slot, held in wrong.items():
        assert f"slot {slot} should hold {truth[slot]} and holds {held}" in answer["error"]
    for slot in {0, 1, 2} - wrong.keys():
        assert f"slot {slot} should" not in answer["error"]
    assert answer["reports"][0]["verdict"] == "mismatch"


@pytest.mark.parametrize(("verify", "verdict"), [("warn", "mismatch"), ("off", "unverified")])
def test_a_wrong_wiring_is_served_when_that_is_asked(schedulers, llama, head, tmp_path, verify, verdict):
    model, folder = llama
    points = ["pre.1", "pre.3", "pre.5"]
    answer = schedulers.run(
        {"CAPTURE_HOOKS_SPEC": ", ".join(points), "CAPTURE_HOOKS_VERIFY": verify},
        sequences=SEQUENCES,
        out=tmp_path / "out",
        **drafting(folder / "target", head),
    )
    assert_delivered(answer, model, points, tmp_path / "out")
    assert answer["reports"][0]["verdict"] == verdict


def test_other_target_weights_are_told(schedulers, llama, head, tmp_path):
    tiny.llama(num_hidden_layers=LAYERS, seed=5).save_pretrained(tmp_path / "target")
    answer = schedulers.run(**drafting(tmp_path / "target", head))
    assert "no state of this model is near it: other target weights?" in answer["error"]


def test_another_precision_is_a_warning_with_its_size(schedulers, llama, head):
    answer = schedulers.run(**drafting(llama[1] / "target", head), dtype="bfloat16")
    assert "error" not in answer
    report = answer["reports"][0]
    assert report["verdict"] == "drift"
    assert "drift over" in report["message"]
    assert "from the witness" in report["message"]


@pytest.mark.parametrize("environment", [{}, {"CAPTURE_HOOKS_VERIFY": "strict"}])
def test_a_server_that_did_not_ask_is_left_alone(schedulers, llama, head, tmp_path, environment):
    """No head: nothing.  A head without a capture section: SGLang reads its ids as it always does."""
    model, folder = llama
    plain = schedulers.run(environment, model_path=str(folder / "target"))
    assert "error" not in plain
    assert plain["reports"] == []
    assert plain["hooks"] == 0
    shutil.copytree(head, tmp_path / "stock")
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    del config["capture"]
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 4]
    (tmp_path / "stock" / "config.json").write_text(json.dumps(config))
    shutil.rmtree(tmp_path / "stock" / "capture")
    stock = schedulers.run(
        environment,
        sequences=SEQUENCES,
        out=tmp_path / "out",
        **drafting(folder / "target", tmp_path / "stock"),
    )
    assert stock["reports"] == []
    assert stock["hooks"] == 0
    assert_delivered(stock, model, ["post.0", "post.2", "post.4"], tmp_path / "out")


def test_a_spec_alone_makes_a_server_return_states(schedulers, llama, tmp_path):
    folder = llama[1]
    points = ["final_norm", "embed", "post.7"]
    answer = schedulers.run(
        {"CAPTURE_HOOKS_SPEC": ", ".join(points)},
        model_path=str(folder / "target"),
        speculative_algorithm="EAGLE3",
        enable_return_aux_hidden_states=True,
    )
    assert "error" not in answer, answer["error"]
    (report,) = answer["reports"]
    assert (report["points"], report["verdict"]) == (points, "unverified")


def test_ids_edited_by_hand_change_nothing(schedulers, llama, head, tmp_path):
    """Stock SGLang would feed the head what those ids mean; the section and its witness stand."""
    model, folder = llama
    shutil.copytree(head, tmp_path / "edited")
    config = json.loads((tmp_path / "edited" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [-1, 1, 3]
    (tmp_path / "edited" / "config.json").write_text(json.dumps(config))
    answer = schedulers.run(
        sequences=SEQUENCES,
        out=tmp_path / "out",
        **drafting(folder / "target", tmp_path / "edited"),
    )
    assert_delivered(answer, model, ["post.1", "post.3", "post.5"], tmp_path / "out")
    assert answer["reports"][0]["verdict"] == "matches"


def edited(head, directory, **changes):
    """A copy of ``head`` whose capture section differs."""
    shutil.copytree(head, directory)
    config = json.loads((directory / "config.json").read_text())
    config["capture"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_bad_input_is_refused_in_one_line(schedulers, llama, head, tmp_path):
    target = llama[1] / "target"
    deeper = tiny.llama(num_hidden_layers=LAYERS + 2)
    deeper.save_pretrained(tmp_path / "deeper")
    narrow = shutil.copytree(head, tmp_path / "narrow")
    tensors = load_file(narrow / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, :64].contiguous()
    save_file(tensors, narrow / "model.safetensors")
    cases = [
        (tmp_path / "deeper", head, {}, f"of {LAYERS} layers of 32; this target is a LlamaForCausalLM of 10"),
        (target, edited(head, tmp_path / "newer", format=2), {}, "has format 2"),
        (target, narrow, {}, "fc.weight"),
        (target, head, {"CAPTURE_HOOKS_SPEC": "post.1, post.3"}, "asks for 2 points"),
        (target, head, {"CAPTURE_HOOKS_SPEC": "post.1, post.3, post.8"}, "post.8"),
        (target, head, {"CAPTURE_HOOKS_SPEC": "post.1, post.3, pots.5"}, "pots.5"),
        (target, head, {"CAPTURE_HOOKS_VERIFY": "maybe"}, "it takes off, warn, strict"),
        (target, head, {"CAPTURE_HOOKS_SPEC": "post.1, post.3, out:model.layers.2.mlp.gate_up_proj"}, "wide"),
    ]
    for model_path, draft, environment, message in cases:
        answer = schedulers.run(environment, **drafting(model_path, draft))
        assert message in answer["error"], answer
        assert answer["reports"][0]["verdict"] == "failed"
        assert message in answer["reports"][0]["message"]


def test_a_spec_without_anyone_to_feed_is_refused(schedulers, llama):
    answer = schedulers.run({"CAPTURE_HOOKS_SPEC": "post.1"}, model_path=str(llama[1] / "target"))
    assert "neither drafts with EAGLE-3 nor returns states" in answer["error"]


def test_every_forward_mode_of_sglangs_is_covered_or_refused_by_name():
    from capture_hooks_sglang.forward import COVERED, REFUSED
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    assert {mode.name for mode in ForwardMode} == COVERED | REFUSED.keys()
