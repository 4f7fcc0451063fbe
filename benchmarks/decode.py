"""What a speculative round costs on this machine, as a share of one plain decoding step.

    python benchmarks/decode.py MODEL [--data PROMPTS] [--head DIRECTORY] [--prompts 4] [--threads 1]

For every number of draft tokens k and both kinds of kernels it decodes greedily with a head and with
`model.generate`, alternating prompt by prompt, and prints the cost of a round over the cost of a step: the
acceptance length at which speculation breaks even.  On one thread the clock is the process's CPU time,
which other load on the machine does not touch.  Without ``--head`` a random EAGLE-3 head of the usual
size takes its place: its drafts are never accepted, but they cost the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from capture_hooks.capture import find_anatomy
from capture_hooks.decoding import PackedLinears, Prompt, SpeculativeDecoder, read_prompts
from capture_hooks.heads import load_head, readout_of
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec


def random_head(model, draft_vocabulary):
    provider = registry().heads["eagle3"]
    anatomy = find_anatomy(model)
    spec = CaptureSpec.eagle3(anatomy.n_layers)
    ids = torch.arange(min(draft_vocabulary, anatomy.vocab_size))
    return provider.create(provider.config_type(), spec, anatomy, readout_of(anatomy, spec), ids).eval()


def seconds_per_step(model, prompt, new, clock):
    ids = prompt.token_ids[None]
    how = {
        "attention_mask": torch.ones_like(ids),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    start = clock()
    model.generate(ids, max_new_tokens=1, **how)
    prefill = clock() - start
    start = clock()
    model.generate(ids, max_new_tokens=new, **how)
    return (clock() - start - prefill) / (new - 1)


def seconds_per_round(decoder, prompt, rounds, clock):
    # As long as it takes for so many rounds: the answer's content does not matter here.
    steps = decoder.stream(prompt.token_ids, 400, do_sample=False, eos_token_id=None, pad_token_id=0)
    next(steps)
    start = clock()
    gained = 0
    for _ in range(rounds):
        gained += len(next(steps).tokens)
    return (clock() - start) / rounds, gained / rounds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--head", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--max-draft", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    head = load_head(arguments.head, model) if arguments.head else random_head(model, arguments.draft_vocab)
    if arguments.data:
        prompts = read_prompts(arguments.data, limit=arguments.prompts)
    else:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(100, model.config.vocab_size, (arguments.prompts, 64), generator=generator)
        prompts = [Prompt(row) for row in rows]
    print(f"{arguments.threads} thread(s), torch {torch.__version__}, clock {clock.__name__}")
    packed = PackedLinears(model)
    packed.refresh()
    print(f"packed copies take {packed.extra_bytes >> 20} MiB; layout and rows by weight shape:")
    for shape, (layout, rows) in packed.choices().items():
        print(f"  {shape}: {layout} for {rows}")
    decoders = {
        (k, name): SpeculativeDecoder(model, head, k, kernels=kernels)
        for name, kernels in (("stock", "stock"), ("packed", packed))
        for k in range(1, arguments.max_draft + 1)
    }
    found = {key: [] for key in decoders}
    for prompt in prompts:
        for key, decoder in decoders.items():
            step = seconds_per_step(model, prompt, arguments.rounds, clock)
            cost, gained = seconds_per_round(decoder, prompt, arguments.rounds, clock)
            found[key].append((step, cost, cost / step, gained))
    print()
    print("| k | kernels | step ms | round ms | round / step (quartiles) | tokens a round |")
    print("|---|---|---|---|---|---|")
    for (k, kernels), rows in found.items():
        step, cost, _, gained = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = sorted(row[2] for row in rows)
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        print(f"| {k} | {kernels} | {step * 1e3:.1f} | {cost * 1e3:.1f} | {ratio} | {gained:.2f} |")


if __name__ == "__main__":
    main()
