"""Several scheduler processes: tensor-parallel ranks and data-parallel replicas; each must prove it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)
if len(os.sched_getaffinity(0)) < 2:
    pytest.skip("a core is needed for each of two ranks", allow_module_level=True)

from capture_hooks.capture import find_anatomy
from capture_hooks.heads import make_witness, readout_of, save_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

HERE = Path(__file__).parent
PROMPT = [5, 9, 20, 33, 77, 101]
TOKENS = 12


def run(folder, head, reports, *, ranks=2, replicas=1, pipeline=1, **extra):
    """The engine's answers (or None), what it printed, and the ranks' reports."""
    reports.mkdir()
    first, second = sorted(os.sched_getaffinity(0))[:2]
    case = {
        "arguments": {
            "model_path": str(folder / "target"),
            "tp_size": ranks,
            "dp_size": replicas,
            "pp_size": pipeline,
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(head),
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
        "prompts": [PROMPT] * replicas,
        "tokens": TOKENS,
    }
    environment = {
        **os.environ,
        "SGLANG_CPU_OMP_THREADS_BIND": f"{first}|{second}",
        "CAPTURE_HOOKS_HANDSHAKE": str(reports),
        **extra,
    }
    done = subprocess.run(
        [sys.executable, HERE / "engine_run.py", json.dumps(case)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        start_new_session=True,
    )
    answer = json.loads(done.stdout) if done.stdout.strip() else None
    return answer, done.stderr, [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp")
    model = tiny.llama(num_hidden_layers=8).float()
    model.save_pretrained(folder / "target")
    return model, folder


def save_a_head(model, spec, directory):
    anatomy, spec = find_anatomy(model), CaptureSpec.parse(spec)
    provider = registry().heads["eagle3"]
    torch.manual_seed(1)
    ids = torch.arange(0, anatomy.vocab_size, 2)
    head = provider.create(provider.config_type(), spec, anatomy, readout_of(anatomy, spec), ids)
    save_head(head, directory, model=model, witness=make_witness(model, spec, [list(range(5, 40))]))
    return directory


@pytest.mark.parametrize(
    ("spec", "mechanism"), [("post.1, post.3, post.5", "native"), ("embed, post.7, final_norm", "hooks")]
)
def test_both_ranks_feed_the_head_what_it_was_trained_on(target, tmp_path, spec, mechanism):
    model, folder = target
    answer, printed, reports = run(folder, save_a_head(model, spec, tmp_path / "head"), tmp_path / "reports")
    assert answer is not None, printed[-3000:]
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert (report["mechanism"], report["verdict"]) == (mechanism, "matches")
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        plain = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    assert answer[0]["ids"] == plain[0, len(PROMPT) :].tolist()
    alone, _, _ = run(folder, tmp_path / "head", tmp_path / "reports-alone", ranks=1)
    assert answer == alone  # as many rounds too: the same drafts were accepted


def test_replicas_prove_it_each(target, tmp_path):
    """Two of one rank: requests go to one and the other in turn, and the answers are the same."""
    model, folder = target
    head = save_a_head(model, "post.1, post.3, final_norm", tmp_path / "head")
    answer, printed, reports = run(folder, head, tmp_path / "reports", ranks=1, replicas=2)
    assert answer is not None, printed[-3000:]
    assert [(report["replica"], report["rank"]) for report in reports] == [(0, 0), (1, 0)]
    assert {report["verdict"] for report in reports} == {"matches"}
    assert answer[0] == answer[1]


def test_a_pipeline_is_refused(target, tmp_path):
    model, folder = target
    head = save_a_head(model, "post.1, post.3, post.5", tmp_path / "head")
    answer, printed, reports = run(folder, head, tmp_path / "reports", ranks=1, pipeline=2)
    assert answer is None
    assert "pp_size=2 and a capture spec" in printed or "pipeline" in printed.lower()
    assert {report["verdict"] for report in reports} <= {"failed"}


#: Plugins of SGLang's own kind that do wrong: what they wrap, how, and what must be said of it.
FAULTS = {
    "another layer on rank 1": (
        "capture_hooks_sglang.serving.delivery.choose_route",
        """
def fault(original, anatomy, spec, reads):
    from capture_hooks.spec import CaptureSpec
    from sglang.srt.runtime_context import get_parallel

    other = CaptureSpec.parse("post.1, post.3, post.4")
    return original(anatomy, other if get_parallel().tp_rank else spec, reads)
""",
        "tensor-parallel ranks capture differently: .* rank 1",
    ),
    "a shard's width": (
        "sglang.srt.layers.logits_processor.LogitsProcessor._get_hidden_states_to_store",
        """
def fault(original, *args, **kwargs):
    stored = original(*args, **kwargs)
    return None if stored is None else stored[..., : stored.shape[-1] // 2].contiguous()
""",
        "is 96 values wide, and 48 were stored in forward mode EXTEND",
    ),
}
ACTIVATE = """
def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register({target!r}, fault, HookType.AROUND)
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(target, tmp_path, fault):
    model, folder = target
    head = save_a_head(model, "post.1, post.3, post.5", tmp_path / "head")
    where, code, message = FAULTS[fault]
    (tmp_path / "fault.py").write_text(code + ACTIVATE.format(target=where))
    info = tmp_path / "fault-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fault\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nfault = fault:activate\n")
    answer, _, reports = run(folder, head, tmp_path / "reports", PYTHONPATH=str(tmp_path))
    assert answer is None
    assert {report["verdict"] for report in reports} == {"failed"}
    for report in reports:
        assert re.search(message, report["message"]), report["message"]
