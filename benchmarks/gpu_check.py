"""What has not yet run on a GPU, in one run of under ten minutes: is it right there, and what does it cost?

    python benchmarks/gpu_check.py TARGET HEAD [--json FILE]

TARGET is a Hugging Face directory and HEAD a head trained for it (``examples/smollm2`` has both).  Three
questions, each answered with a number and a verdict; the exit code is 1 when one is "wrong":

1. Our hooks recorded in a CUDA graph: after replays on other inputs, is the static buffer what an eager
   forward captures?
2. SGLang with CUDA graphs, native capture: does the witness fit, is every answer that of an eager server, and
   what is the acceptance length?
3. The same with our hooks (points turned round, which the native list cannot express, and only warned about):
   do graph and eager deliver the same, told by the same acceptance length?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: Ids that every vocabulary has.
PROMPTS = [[1, 90, 11, 40, 109], [1, 79, 68, 31, 98, 37], [1, 44, 65, 35]]
TOKENS = 96


def graph_capture(target: str) -> dict[str, Any]:
    """Largest relative difference between a replayed graph's buffer and an eager capture."""
    import torch
    from transformers import AutoModelForCausalLM

    from capture_hooks import bind

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).cuda().eval()
    last = model.config.num_hidden_layers - 1
    spec = f"embed, post.{last // 2}, post.{last}"
    ids = torch.zeros(1, 64, dtype=torch.long, device="cuda")
    out = torch.zeros(64, 3 * model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    worst = 0.0
    with torch.inference_mode():
        with bind(model, spec, out=out) as session:
            warm = torch.cuda.Stream()
            with torch.cuda.stream(warm):
                for _ in range(3):
                    session.clear()
                    model(ids, use_cache=False)
            torch.cuda.current_stream().wait_stream(warm)
            graph = torch.cuda.CUDAGraph()
            session.clear()
            with torch.cuda.graph(graph):
                model(ids, use_cache=False)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            ids.copy_(torch.randint(model.config.vocab_size, (1, 64), generator=generator))
            graph.replay()
            torch.cuda.synchronize()
            with bind(model, spec) as eager:
                model(ids, use_cache=False)
            truth = eager.states.packed.float()
            worst = max(worst, float((out.float() - truth).abs().max() / truth.abs().max()))
    return {"relative difference": worst, "verdict": "right" if worst < 1e-2 else "wrong"}


def served(target: str, head: str, graphs: bool, environment: dict[str, str]) -> dict[str, Any]:
    """One engine in a process of its own: answers, acceptance length, the ranks' reports."""
    with tempfile.TemporaryDirectory() as reports:
        code = subprocess.run(
            [sys.executable, __file__, target, head, "--serve", "graphs" if graphs else "eager"],
            env={**os.environ, **environment, "CAPTURE_HOOKS_HANDSHAKE": reports},
            capture_output=True,
            text=True,
            timeout=240,
        )
        lines = [line for line in code.stdout.splitlines() if line.startswith("{")]
        if not lines:
            return {"error": code.stderr[-2000:]}
        found = [json.loads(path.read_text()) for path in sorted(Path(reports).glob("*.json"))]
        return {**json.loads(lines[-1]), "reports": found}


def serve(target: str, head: str, graphs: bool) -> None:
    """The body of `served`'s process."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(
        model_path=target,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=head,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        disable_cuda_graph=not graphs,
        mem_fraction_static=0.5,
        log_level="error",
    )
    parameters = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=[parameters] * len(PROMPTS))
    gained = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    print(json.dumps({"ids": [a["output_ids"] for a in answers], "length": gained / rounds}), flush=True)
    engine.shutdown()


def compare(target: str, head: str, environment: dict[str, str]) -> dict[str, Any]:
    """Graph against eager."""
    graph, eager = (served(target, head, graphs, environment) for graphs in (True, False))
    if "error" in graph or "error" in eager:
        return {"graph": graph, "eager": eager, "verdict": "wrong"}
    same = sum(a == b for a, b in zip(graph["ids"], eager["ids"], strict=True))
    close = abs(graph["length"] - eager["length"]) <= 0.05 * eager["length"]
    return {
        "answers the same": f"{same}/{len(PROMPTS)}",
        "acceptance length, graph": graph["length"],
        "acceptance length, eager": eager["length"],
        "witness": [report["verdict"] for report in graph["reports"]],
        "mechanism": [report["mechanism"] for report in graph["reports"]],
        "verdict": "right" if close and graph["reports"] else "wrong",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=("graphs", "eager"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.target, args.head, args.serve == "graphs")
        return
    points = json.loads((Path(args.head) / "config.json").read_text())["capture"]["file_inputs"]
    turned = {"CAPTURE_HOOKS_SPEC": ", ".join(reversed(points)), "CAPTURE_HOOKS_VERIFY": "warn"}
    report = {
        "hooks in a CUDA graph": graph_capture(args.target),
        "SGLang, native capture": compare(args.target, args.head, {}),
        "SGLang, our hooks": compare(args.target, args.head, turned),
    }
    for question, answer in report.items():
        print(f"{question}: {answer}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2))
    sys.exit(any(answer["verdict"] == "wrong" for answer in report.values()))


if __name__ == "__main__":
    main()
