"""The main job on a real model: capture -> train -> decode, with the commands a user would type.

    python demo.py [--minutes 9] [--tokens N] [--prompts 12]

Prints each command, runs it, and ends with one table: the head it has just trained beside the one
that the same commands trained for longer (``examples/smollm2/head``).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from target import materialise

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "demo"
GROWN = HERE / "head"
SPEC = "post.2, post.15, post.27"
#: Muon learns a third more from each token, and multiplies in bfloat16 whatever the precision is.
RECIPE = {
    "bfloat16": ("--precision", "bf16", "--optimizer", "muon", "--lr", "5e-3"),
    "float32": ("--precision", "float32", "--optimizer", "adamw", "--lr", "2e-3"),
}
TABLE = (
    ("held-out acceptance by draft position", lambda r: shares(r["offline"]["acceptance"])),
    ("mean acceptance length, decoding", lambda r: f"{r['decoding']['acceptance_length']:.2f}"),
    ("break-even acceptance length here", lambda r: f"{r['break_even']:.2f}"),
    ("tokens/s, model.generate", lambda r: f"{r['plain_tokens_per_second']:.1f}"),
    ("tokens/s, speculative", lambda r: f"{r['tokens_per_second']:.1f} ({r['speedup']:.2f}x)"),
    ("identical", lambda r: f"{r['identical']}/{r['prompts']}"),
)


def shares(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def run(*command: str | Path, capture: bool = False) -> str:
    """Run ``capture-hooks COMMAND`` from this environment, echoing what a user would type."""
    print(f"\n$ capture-hooks {shlex.join(str(word) for word in command)}", flush=True)
    program = Path(sys.executable).with_name("capture-hooks")
    done = subprocess.run(
        [program, *map(str, command)], cwd=ROOT, stdout=subprocess.PIPE if capture else None, text=True
    )
    if done.returncode:
        sys.exit(
            f"demo: that command failed with exit code {done.returncode}; run it again by hand to see why"
        )
    return done.stdout or ""


def split_data(train_tokens: int) -> dict[str, int]:
    """Write build/demo/{train,held-out}.jsonl; returns the tokens of each, prompts included."""
    totals = {"train": 0, "held-out": 0}
    files = {split: (BUILD / f"{split}.jsonl").open("w") for split in totals}
    with gzip.open(HERE / "conversations.jsonl.gz", "rt") as lines:
        next(lines)  # provenance
        for text in lines:
            line = json.loads(text)
            split = line.pop("split")
            size = len(line["prompt_ids"]) + len(line["answer_ids"])
            if split == "train" and totals["train"] + size > train_tokens:
                continue
            totals[split] += size
            files[split].write(json.dumps(line) + "\n")
    for file in files.values():
        file.close()
    return totals


def tokens_per_second(target: Path) -> tuple[str, float]:
    """The faster of float32 and bfloat16 for the target's forward here, and its rate."""
    import torch
    from transformers import AutoModelForCausalLM

    rates = {}
    for dtype in ("float32", "bfloat16"):
        model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
        ids = torch.randint(0, model.config.vocab_size, (4, 256), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            model(ids[:1])
            seconds = []
            for _ in range(3):  # the best of three: another program may be busy for a moment
                started = time.perf_counter()
                model(ids)
                seconds.append(time.perf_counter() - started)
            rates[dtype] = ids.numel() / min(seconds)
    # bfloat16 states are a little noisier: take them only where they save much.
    best = "bfloat16" if rates["bfloat16"] > 1.5 * rates["float32"] else "float32"
    return best, rates[best]


def plan_for(target: Path, dump_minutes: float) -> dict:
    """How much data this machine can take; kept, so that a second run reuses the first one's states."""
    kept = BUILD / "plan.json"
    if kept.exists() and (plan := json.loads(kept.read_text()))["dump_minutes"] == dump_minutes:
        return plan
    shutil.rmtree(BUILD / "states", ignore_errors=True)
    dtype, rate = tokens_per_second(target)
    totals = split_data(int(rate * 60 * dump_minutes))
    plan = {"dump_minutes": dump_minutes, "dtype": dtype, "rate": rate, "train_tokens": totals["train"]}
    kept.write_text(json.dumps(plan))
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9, help="of training")
    parser.add_argument("--dump-minutes", type=float, default=3, help="of capturing states")
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts to decode")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    BUILD.mkdir(parents=True, exist_ok=True)
    started = time.time()

    print("Target: SmolLM2-135M-Instruct, read from its package (under a minute, once)", flush=True)
    target = materialise(ROOT / "build" / "smollm2")
    plan = plan_for(target, args.dump_minutes)
    dtype, rate, tokens = plan["dtype"], plan["rate"], plan["train_tokens"]
    print(
        f"This machine reads about {rate:,.0f} tokens a second in {dtype}, so the demo takes\n"
        f"{tokens:,} of the training tokens: about {tokens / rate / 60:.1f} minutes to capture, "
        f"{args.minutes:g} to train,\nand about 4 to decode {args.prompts} held-out prompts with two heads.",
        flush=True,
    )
    common = ("--model", target.relative_to(ROOT))
    dump, head = BUILD / "states", BUILD / "head"
    held_out = (BUILD / "held-out.jsonl").relative_to(ROOT)
    run(
        "dump", *common, "--spec", SPEC, "--data", (BUILD / "train.jsonl").relative_to(ROOT),
        "--out", dump.relative_to(ROOT), "--model-dtype", dtype, "--dtype", "bfloat16",
    )  # fmt: skip
    run(
        "train", *common, "--dump", dump.relative_to(ROOT), "--out", head.relative_to(ROOT),
        "--draft-vocab", "7168", "--max-minutes", str(args.minutes), "--weight-decay", "0.05",
        "--batch-tokens", "1024", "--evaluations", "4", "--overwrite", *RECIPE[dtype],
    )  # fmt: skip
    reports = {}
    for name, directory in (("trained just now", head), ("grown", GROWN)):
        report = run(
            "eval", *common, "--head", directory.relative_to(ROOT), "--data", held_out,
            "--limit", str(args.prompts), "--max-new-tokens", "64",
            "--tree", "3,2,6", "--kernels", "packed", "--json",
            capture=True,
        )  # fmt: skip
        reports[name] = json.loads(report)

    from rich.console import Console
    from rich.table import Table

    table = Table(
        "",
        *reports,
        title=f"SmolLM2-135M-Instruct, {args.prompts} held-out prompts, greedy, trees of 6 drafted tokens",
    )
    for label, cell in TABLE:
        table.add_row(label, *(cell(report) for report in reports.values()))
    Console(width=None if sys.stdout.isatty() else 110).print(table, highlight=False)
    (BUILD / "report.json").write_text(json.dumps(reports, indent=2))
    print(f"{(time.time() - started) / 60:.1f} minutes, installation not counted. Now try:")
    print(
        f"$ .venv/bin/capture-hooks generate --model {common[1]} --head {GROWN.relative_to(ROOT)} "
        '--prompt "Why is the sky blue?"'
    )


if __name__ == "__main__":
    main()
