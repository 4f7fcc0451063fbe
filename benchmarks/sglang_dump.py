"""Dumping through SGLang against its bare prefill: tokens per second, over the same sequences, interleaved.

    python benchmarks/sglang_dump.py MODEL [--rounds 8] [--sequences 16] [--spec ...] [-- any SGLang flag]

Two servers run with the same flags: one is asked by the whole of `write_dump` (capture, greedy
tokens, files, checks, checksums, shards and manifest on disk), the other only prefills.  Each round times
both over the same sequences, in alternating order, so the ratio of a round is paired.  Beside wall time is
the CPU time of all processes, as wall time on a shared machine says little.  Whichever is not asked sleeps.

SGLang's prefill computes logits of the last token alone, a dump the greedy token behind every one.  A third
side (``--every-logit``) asks the bare server for log-probabilities of all tokens: that work, and more.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from capture_hooks_sglang.driver import SGLangDriver

from capture_hooks import CaptureSpec
from capture_hooks.engines.dump import EngineStates, dtype_of, first_states
from capture_hooks.engines.process import EngineProcess
from capture_hooks.engines.prompts import IN_FLIGHT
from capture_hooks.store import Example, Examples, write_dump
from capture_hooks.target import checkpoint_fingerprint, hollow_anatomy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=16, help="in each round")
    parser.add_argument("--spec", default=None, help="default: the EAGLE-3 layers")
    parser.add_argument("--dtype", default=None, help="of the stored states; default: the engine's")
    parser.add_argument("--every-logit", action="store_true")
    parser.add_argument("--json", action="store_true")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])

    model = Path(args.model)
    anatomy = hollow_anatomy(args.model)
    spec = CaptureSpec.parse(args.spec) if args.spec else CaptureSpec.eagle3(anatomy.n_layers)
    flags = [*words[end + 1 :], "--sleep-on-idle"]
    source = random.Random(0)
    parts = [
        _examples(source, args.sequences, anatomy.vocab_size, number) for number in range(args.rounds + 1)
    ]
    rounds: list[tuple[int, dict[str, tuple[float, float]]]] = []
    driver = SGLangDriver()
    with driver.bare(model, flags) as (bare, _), driver.capture(model, spec, flags) as engine:
        trial = first_states(engine, parts[0])
        fingerprint = checkpoint_fingerprint(args.model, dtype_of(trial))
        for number, part in enumerate(parts):

            def dump(part: Examples = part) -> None:
                directory = Path(tempfile.mkdtemp(prefix="dump-benchmark-"))
                try:
                    states = EngineStates(engine, trial, anatomy, fingerprint, spec, part, dtype=args.dtype)
                    write_dump(states, directory / "d")
                finally:
                    shutil.rmtree(directory)

            sides: dict[str, Callable[[], None]] = {
                "bare": lambda part=part: _prefill(bare, part),
                "dump": dump,
            }
            if args.every_logit:
                sides["every logit"] = lambda part=part: _prefill(bare, part, logprob_start_len=0)
            order = list(sides) if number % 2 else list(sides)[::-1]
            times = {name: _timed(sides[name]) for name in order}
            if number == 0:
                continue  # warming up
            tokens = sum(len(example) for example in part)
            rounds.append((tokens, times))
            if not args.json:
                wall = times["bare"][1] / times["dump"][1]
                print(f"round {number:2d}: {tokens:6,} tokens, dump/bare {wall:.3f} of wall time", flush=True)
    _report(rounds, args.json)


def _examples(source: random.Random, count: int, vocab_size: int, seed: int) -> Examples:
    tokens = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        n = source.randint(64, 320)
        ids = torch.randint(vocab_size, (n,), generator=tokens)
        made.append(Example(ids, torch.ones(n, dtype=torch.bool), "random"))
    return Examples("benchmark", tuple(made))


def _prefill(server: EngineProcess, examples: Examples, **options: Any) -> None:
    sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
    if options:
        options["return_logprob"] = True

    def one(example: Example) -> None:
        answer = server.post(
            "/generate",
            {"input_ids": example.token_ids.tolist(), "sampling_params": sampling, **options},
        )
        assert answer["meta_info"]["prompt_tokens"] == len(example)

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(one, examples))


def _timed(call: Callable[[], None]) -> tuple[float, float]:
    """CPU seconds of this process and all below it, and wall seconds."""
    cpu, wall = _cpu_seconds(), time.perf_counter()
    call()
    return _cpu_seconds() - cpu, time.perf_counter() - wall


def _cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def _report(rounds: list[tuple[int, dict[str, tuple[float, float]]]], as_json: bool) -> None:
    found: dict[str, Any] = {}
    for clock, which in (("cpu", 0), ("wall", 1)):
        found[clock] = {}
        for other in [name for name in rounds[0][1] if name != "dump"]:
            ratios = [times[other][which] / times["dump"][which] for _, times in rounds]
            low, middle, high = _interval(ratios)
            speed = {
                name: _median([tokens / times[name][which] for tokens, times in rounds])
                for name in (other, "dump")
            }
            found[clock][other] = {"ratio": middle, "low": low, "high": high, **speed}
            if not as_json:
                print(
                    f"{clock:>4} time: the dump reaches {middle:.1%} of {other}'s tokens/s (95 % interval of "
                    f"the median {low:.1%} to {high:.1%}); {speed['dump']:,.0f} against "
                    f"{speed[other]:,.0f} tokens/s"
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
