"""Conversions of hidden-state dumps against plain copies of the same bytes, interleaved.

    python benchmarks/convert_dump.py [--megabytes 1024] [--rounds 5] [--folder build/convert_dump]

A synthetic dump (random bfloat16 states, sequences of 1,024 tokens) is copied and converted in turn:

* *copy*: ``shutil.copyfile`` of every file;
* *durable copy*: and each flushed to the disk, as every conversion does;
* *checked copy*: and each hashed with SHA-256 too, as a conversion to ours does.

Shown is a conversion's throughput over a copy's, by wall time and by CPU time of the process (all threads).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import shutil
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from capture_hooks import CaptureSpec
from capture_hooks.interop.dumps import FORMATS, Declared, convert_dump
from capture_hooks.interop.dumps.contract import DumpPlan, Facts, Rows

TOKENS, HIDDEN = 1024, 2048
SPEC = CaptureSpec.parse("post.0, post.1, post.2")
FOREIGN = ("vllm", "speculators", "speculators-v1", "specforge", "modelopt")


class Random:
    """A source of sequences that share their states and differ in their tokens."""

    facts = Facts(dtype="bfloat16", width=3 * HIDDEN, hidden=HIDDEN)

    def __init__(self, sequences):
        self.sequences = sequences
        self.states = torch.randn(TOKENS, 4 * HIDDEN).bfloat16()

    def __len__(self):
        return self.sequences

    def place(self, index):
        return f"sequence {index}"

    def tokens(self, index):
        ids = torch.randint(256, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return ids, torch.arange(TOKENS) >= TOKENS // 4

    def rows(self, index):
        inputs, last = self.states.split([3 * HIDDEN, HIDDEN], dim=1)
        return Rows(self.place(index), *self.tokens(index), inputs, last)


def copy(source, destination, *, durable=False, checked=False):
    for path in sorted(source.rglob("*")):
        to = destination / path.relative_to(source)
        if path.is_dir():
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        if checked:
            with open(path, "rb") as file:
                hashlib.file_digest(file, "sha256")
        if durable:
            descriptor = os.open(to, os.O_RDWR)
            os.fsync(descriptor)
            os.close(descriptor)


def measured(work):
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def make(folder, sequences):
    """A target, one dump of each format, and how each is converted into ours."""
    target = folder / "target"
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(target)
    for name in FOREIGN:
        (folder / name).mkdir()
        last = FORMATS[name].meaning.wants or "normed"
        plan = DumpPlan((TOKENS,) * sequences, last, "random", SPEC, None, "random", None)
        FORMATS[name].write(folder / name, Random(sequences), plan)
    stated = Declared(spec=SPEC, target=str(target), pickles=True)
    extracted = Declared(spec=SPEC, target=str(target), last="unnormed", masks="all")
    convert_dump(folder / "speculators", folder / "ours", to="capture-hooks", declared=stated)
    into_ours = [(name, "capture-hooks", extracted if name == "vllm" else stated) for name in FOREIGN]
    return into_ours + [("ours", name, Declared()) for name in FOREIGN if name != "specforge"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build/convert_dump"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder, out = given.folder, given.folder / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sequences = max(1, given.megabytes * 2**20 // (TOKENS * 4 * HIDDEN * 2))
    pairs = make(folder, sequences)
    times = defaultdict(list)

    def run(pair, what, work):
        shutil.rmtree(out, ignore_errors=True)
        os.sync()
        times[pair, what].append(measured(work))

    for number in range(given.rounds + 1):
        for source, to, stated in pairs:
            pair, origin = (source, to), folder / source
            run(pair, "copy", lambda: copy(origin, out))  # noqa: B023  # called at once
            run(pair, "durable copy", lambda: copy(origin, out, durable=True))  # noqa: B023
            run(pair, "checked copy", lambda: copy(origin, out, durable=True, checked=True))  # noqa: B023
            run(pair, "ours", lambda: convert_dump(origin, out, to=to, declared=stated))  # noqa: B023
        if not number:
            times.clear()  # the first round fills caches

    print(
        f"{sequences} sequences of {TOKENS} tokens, 4 states of {HIDDEN} in bfloat16; {given.rounds} rounds"
    )
    print("median (lowest to highest) of throughput over a copy's\n")
    names = "copy", "durable copy", "checked copy"
    baselines = [(name, kind) for kind in (0, 1) for name in names]
    titles = [f"{name}, {'CPU' if kind else 'wall'}" for name, kind in baselines]
    print(f"{'':34}" + "".join(f"{title:>21}" for title in titles))
    for source, to, _ in pairs:
        cells = []
        for name, kind in baselines:
            both = zip(times[(source, to), name], times[(source, to), "ours"], strict=True)
            ratios = sorted(theirs[kind] / ours[kind] for theirs, ours in both)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"{source:>15} -> {to:<15}" + "".join(f"{cell:>21}" for cell in cells))
    print(
        f"\nmost memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB"
    )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
