"""Heads that other libraries trained, converted: the same acceptance in the embedded engine, vLLM and SGLang.

Decoding is greedy and drafts are chains, so a head that is fed the same states drafts the same tokens: what
is compared is the number of rounds, exactly.  Their own exports are run too, as they lie.
"""

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path

import peer
import pytest
import real_heads as real
import torch

from capture_hooks import CaptureSpec, bind
from capture_hooks.decoding import SpeculativeDecoder
from capture_hooks.heads import load_head
from capture_hooks.interop.explain import ExplainOptions, agrees, explain_head

pytestmark = pytest.mark.slow

#: Every flag of these can be served by all three engines.
EVERYWHERE = ("speculators", "specforge", "modelopt")
#: The layers before `real.SPEC`'s: what vLLM captures for ids that count from the other side.
EARLIER = "embed, post.1, post.4"
#: Those that engines take where they read no list.
DEFAULT = "post.1, post.3, post.4"
ENGINES = peer.ROOT / "tests" / "engines"
CPU = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGL_KERNEL_CPU_ATTENTION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
FLAGS = {
    "vllm": ["--max-model-len", "256", "--max-num-seqs", "1"],
    "sglang": [
        *("--device", "cpu", "--attention-backend", "intel_amx", "--dtype", "float32"),
        *("--disable-overlap-schedule", "--disable-cuda-graph", "--max-total-tokens", "1024"),
        *("--max-running-requests", "2", "--speculative-num-steps", str(real.DRAFT)),
    ],
}


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(real.target()).eval()


@pytest.fixture(scope="module")
def embedded(model):
    """The embedded engine's rounds with a converted head: on its own states, or misled to others."""

    @functools.cache
    def rounds(name, spec=None, written_for=None, twice=False):
        head = head_of(name, model, written_for)
        if spec is not None:
            head.spec = CaptureSpec.parse(spec)
        if twice:
            norm_twice(head)
        return decoded(head, model)

    return rounds


def head_of(name, model, written_for=None):
    return load_head(real.converted(name, written_for), model).float().eval()


def decoded(head, model):
    """Rounds over the prompts; every answer is the target's own."""
    decoder = SpeculativeDecoder(model, head, draft_tokens=real.DRAFT)
    rounds = 0
    for talk in real.talks():
        steps = [*decoder.stream(torch.tensor([talk["prompt_ids"]]), real.ANSWER, do_sample=False)]
        assert [token for step in steps for token in step.tokens] == talk["answer_ids"]
        rounds += len(steps) - 1  # the first is the prompt's
    return rounds


def norm_twice(head):
    """Layer 0 reads ``hidden_norm(input_layernorm(h))``, as ModelOpt trains it."""
    once = head.read

    def read(index, h, dtype):
        first = head.decoder_layers[0].input_layernorm
        return once(index, head.normed(h, first), dtype)[0], h

    head.read = read


def served(engine, *names):
    """Rounds through `EngineProvider.decode`, the head's witness shown first."""
    home = peer.interpreter(engine)
    if engine == "vllm" and not (peer.ROOT / ".venv-vllm" / ".ours").exists():
        pytest.skip("capture-hooks is not installed beside vLLM: make vllm")
    settings = {
        "target": str(real.target()),
        "heads": [str(real.converted(name)) for name in names],
        "prompts": [talk["prompt_ids"] for talk in real.talks()],
        "tokens": real.ANSWER,
        "flags": FLAGS[engine],
    }
    return rounds_of(run([home, Path(__file__).with_name("served.py"), engine], settings))


def run(line, settings):
    """The JSON that a program prints when it is given settings in a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(settings, file)
        file.flush()
        words = [*map(str, line), file.name]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **CPU})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout)


def rounds_of(found):
    """Rounds by head; every answer is the target's own."""
    answers = [talk["answer_ids"] for talk in real.talks()]
    for one in found:
        assert "error" not in one, one["error"]
        assert one["answers"] == answers
    return [one["rounds"] for one in found]


@pytest.fixture(scope="module")
def stock_vllm():
    """Rounds of heads as they lie, through vLLM's own API."""

    def rounds(*heads):
        settings = {
            "target": str(real.target()),
            "heads": [str(head) for head in heads],
            "prompts": [talk["prompt_ids"] for talk in real.talks()],
            "tokens": real.ANSWER,
            "draft": real.DRAFT,
        }
        line = [peer.interpreter("vllm"), peer.WORKERS / "decode_vllm.py"]
        return rounds_of(run(line, settings))

    return rounds


@pytest.mark.parametrize("name", [*real.RECIPES])
def test_a_converted_head_eats_what_it_was_trained_on(name, model):
    head = head_of(name, model)
    assert head.spec.resolve(real.LAYERS) == real.SPEC.resolve(real.LAYERS)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_other_layers_cost_acceptance(name, embedded):
    """So that a fall-back to some default, or an id that is one off, shows in the figures below."""
    right = embedded(name)
    assert embedded(name, EARLIER) > 1.2 * right
    assert embedded(name, DEFAULT) > 1.2 * right


def test_eval_says_the_same(embedded):
    """With a head in float32: the embedded engine computes in the file's precision, servers in their own."""
    words = ["--model", real.target(), "--head", real.converted("modelopt"), "--json"]
    words += ["--data", real.target() / "prompts.jsonl", "--max-new-tokens", real.ANSWER]
    report = json.loads(real.capture_hooks("eval", *words, "--draft-tokens", real.DRAFT))
    assert report["identical"] == real.PROMPTS
    assert report["decoding"]["rounds"] == embedded("modelopt")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_converted_head_is_accepted_as_often_in_a_server(engine, embedded):
    assert served(engine, *EVERYWHERE) == [embedded(name) for name in EVERYWHERE]


def test_what_exports_give_in_stock_vllm(embedded, stock_vllm):
    names = ("speculators", "speculators-default", "specforge", "modelopt", "specforge-norm-output")
    own, default, specforge, modelopt, norm_output = stock_vllm(*map(real.head, names))
    # vLLM reads speculators' layout, flags and ids.
    assert own == embedded("speculators")
    assert default == embedded("speculators-default")
    # Of the nested ids, outputs of layers, it captures the inputs: one layer off, and nothing else.
    assert specforge == embedded("specforge", EARLIER)
    assert modelopt == embedded("modelopt", EARLIER)
    # And it takes SpecForge's norm_output for its own.
    assert (
        norm_output
        > embedded(
            "specforge-norm-output",
        )
        * 1.2
    )


def test_what_conversion_makes_of_them_in_stock_vllm(embedded, stock_vllm):
    names = ("speculators-default", "specforge-norm-output")
    assert stock_vllm(*map(real.converted, names)) == [embedded(name) for name in names]


def test_what_exports_give_in_stock_sglang(embedded):
    """Nested ids mean to it what they mean to ModelOpt and SpecForge; a top-level norm_output does not."""
    home = peer.interpreter("sglang")
    rounds = {}
    for name in ("modelopt", "specforge-norm-output"):
        arguments = {
            "model_path": str(real.target()),
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(real.head(name)),
            "speculative_num_steps": real.DRAFT,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": real.DRAFT + 1,
        }
        prompts = [talk["prompt_ids"] for talk in real.talks()]
        case = json.dumps({"arguments": arguments, "prompts": prompts, "tokens": real.ANSWER})
        done = subprocess.run([str(home), "engine_run.py", case], capture_output=True, text=True, cwd=ENGINES)
        assert done.returncode == 0, done.stderr[-6000:]
        answers = json.loads(done.stdout)
        assert [answer["ids"] for answer in answers] == [talk["answer_ids"] for talk in real.talks()]
        rounds[name] = sum(answer["rounds"] for answer in answers)
    assert rounds["modelopt"] == embedded("modelopt")
    assert rounds["specforge-norm-output"] == embedded("specforge-norm-output", None, "sglang")
    assert rounds["specforge-norm-output"] > 1.1 * embedded("specforge-norm-output")


def test_modelopts_hooks_see_what_a_converted_dump_holds():
    says = json.loads((real.head("modelopt") / "modelopt-says.json").read_text())
    assert says["from_dump"] < 1e-5


def test_modelopts_second_norm_is_not_served(model, embedded):
    """Its own validation drafts with ``hidden_norm(input_layernorm(h))``; no server computes that."""
    says = json.loads((real.head("modelopt") / "modelopt-says.json").read_text())
    assert sum(says["rounds"][: real.PROMPTS]) == embedded("modelopt", twice=True)
    head = head_of("modelopt", model)
    ids = torch.tensor([[*talk["prompt_ids"], *talk["answer_ids"]] for talk in real.talks()])
    with torch.no_grad(), bind(model, real.SPEC) as capture:
        model(ids)
    layer = head.decoder_layers[0]
    gain = layer.input_layernorm.weight
    with torch.no_grad():
        h = head.combine(capture.states.packed)
        trained = head.normed(head.normed(h, layer.input_layernorm), layer.hidden_norm)
        once = head.normed(h, layer.hidden_norm)
        folded = once * gain / gain.square().mean().sqrt()

    def off(fed):
        return float((fed - trained).norm() / trained.norm())

    # hidden_norm could take the other's gain: what remains is one factor for each token.
    assert off(once) > 0.01
    assert off(folded) < off(once) / 5


@pytest.mark.parametrize("name", EVERYWHERE)
def test_explain_agrees_with_the_converted_head(name):
    asked = ExplainOptions(target=str(real.target()))
    assert agrees(explain_head(str(real.converted(name)), asked), ["sglang", "vllm.v1", "vllm.v2"])


def test_explain_says_who_cannot_serve_a_head_with_speculators_defaults():
    report = explain_head(
        str(real.converted("speculators-default")), ExplainOptions(target=str(real.target()))
    )
    assert agrees(report, ["vllm.v1", "vllm.v2"])
    assert not agrees(report, ["sglang"])
