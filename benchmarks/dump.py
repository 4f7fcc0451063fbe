"""Dumping against the bare forward: tokens per CPU second, over the same batches, interleaved.

    python benchmarks/dump.py MODEL [DATA] [--rounds 12] [--spec ...] [--dtype ...]

The bare forward is ``model(input_ids, attention_mask)`` under inference mode over exactly the batches that
the dump makes: no hooks, nothing kept.  The dump is the whole of `write_dump`: forward, greedy tokens,
checks, checksums, shards and manifest on disk.  It may come out ahead: it spares the output layer on padding,
and the attention mask.  Each round times both, in alternating order; the ratio of a round is paired.  CPU
time of the whole process (all threads) is compared, as wall time on a shared machine says little; both are
shown.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from capture_hooks import CaptureSpec
from capture_hooks.store import Example, Examples, ModelStates, read_examples, write_dump
from capture_hooks.store.dump import plan_shards
from capture_hooks.store.model import plan_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", nargs="?", help="token ids or conversations; random tokens when left out")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sequences", type=int, default=8, help="sequences in each round")
    parser.add_argument("--spec", default=None, help="default: the EAGLE-3 layers")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval().to(args.device)
    examples = _examples(args.data, args.rounds * args.sequences, model.config.vocab_size)
    layers = model.config.num_hidden_layers
    spec = CaptureSpec.parse(args.spec) if args.spec else CaptureSpec.eagle3(layers)
    rounds = []
    for number in range(args.rounds):
        part = examples[number * args.sequences : (number + 1) * args.sequences]
        job = ModelStates(
            model, spec, Examples("benchmark", tuple(part)), dtype=args.dtype, batch_tokens=args.batch_tokens
        )
        lengths = [len(example) for example in part]
        batches = [
            [part[i].token_ids for i in batch]
            for shard in plan_shards(lengths, job.manifest.shard_tokens)
            for batch in plan_batches(lengths, shard, args.batch_tokens)
        ]

        def bare(batches: list[list[torch.Tensor]] = batches) -> None:
            with torch.inference_mode():
                for batch in batches:
                    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
                    mask = torch.nn.utils.rnn.pad_sequence(
                        [torch.ones_like(t) for t in batch], batch_first=True
                    )
                    model(input_ids=ids.to(args.device), attention_mask=mask.to(args.device), use_cache=False)

        def dump(job: ModelStates = job) -> None:
            directory = Path(tempfile.mkdtemp(prefix="dump-benchmark-"))
            try:
                write_dump(job, directory / "d")
            finally:
                shutil.rmtree(directory)

        if number == 0:  # warm up
            bare()
            dump()
        order = [("bare", bare), ("dump", dump)]
        times = dict(_timed(name, call, args.device) for name, call in (order if number % 2 else order[::-1]))
        rounds.append((sum(lengths), times))
        if not args.json:
            cpu = times["bare"][0] / times["dump"][0]
            print(f"round {number + 1:2d}: {sum(lengths):6,} tokens, dump/bare {cpu:.3f}", flush=True)
    _report(rounds, args.json)


def _examples(data: str | None, count: int, vocab_size: int) -> list[Example]:
    if data is not None:
        return list(read_examples(data, limit=count))
    source = random.Random(0)
    lengths = [source.randint(64, 320) for _ in range(count)]
    tokens = torch.Generator().manual_seed(0)
    return [
        Example(torch.randint(vocab_size, (n,), generator=tokens), torch.ones(n, dtype=torch.bool), "random")
        for n in lengths
    ]


def _timed(name: str, call: Callable[[], None], device: str) -> tuple[str, tuple[float, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return name, (time.process_time() - cpu, time.perf_counter() - wall)


def _report(rounds: list[tuple[int, dict[str, tuple[float, float]]]], as_json: bool) -> None:
    found = {}
    for clock, which in (("cpu", 0), ("wall", 1)):
        ratios = [times["bare"][which] / times["dump"][which] for _, times in rounds]
        low, middle, high = _interval(ratios)
        speed = {
            name: sorted(tokens / times[name][which] for tokens, times in rounds)[len(rounds) // 2]
            for name in ("bare", "dump")
        }
        found[clock] = {"ratio": middle, "low": low, "high": high, **speed}
        if not as_json:
            print(
                f"{clock:>4} time: the dump reaches {middle:.1%} of the bare forward's tokens/s "
                f"(95 % interval of the median {low:.1%} to {high:.1%}); "
                f"{speed['dump']:,.0f} against {speed['bare']:,.0f} tokens/s"
            )
    if as_json:
        print(json.dumps(found, indent=1))


def _interval(values: list[float], resamples: int = 10_000) -> tuple[float, float, float]:
    """Median with its 95 % bootstrap interval."""
    source = random.Random(0)
    medians = sorted(_median(source.choices(values, k=len(values))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], _median(values), medians[int(0.975 * resamples)]


def _median(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


if __name__ == "__main__":
    main()
