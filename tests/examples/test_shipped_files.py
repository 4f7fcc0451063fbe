"""What the examples carry is whole: the grown head describes itself, and no prompt is on both sides."""

import gzip
import json
from pathlib import Path

from capture_hooks.heads import inspect_head
from capture_hooks.spec import CaptureSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


def test_the_grown_head_says_what_it_eats_and_who_can_serve_it() -> None:
    head = inspect_head(EXAMPLE / "head")
    assert head.spec == CaptureSpec.parse("post.2, post.15, post.27")
    assert {engine.engine for engine in head.engines if engine.right} == {
        "embedded",
        "sglang",
        "vllm",
        "specforge",
    }
    assert sum(file.stat().st_size for file in (EXAMPLE / "head").rglob("*") if file.is_file()) <= 20e6


def test_conversations_are_split_by_prompt() -> None:
    with gzip.open(EXAMPLE / "conversations.jsonl.gz", "rt") as lines:
        header, *conversations = map(json.loads, lines)
    sides: dict[str, set[tuple[int, ...]]] = {"train": set(), "held-out": set()}
    for line in conversations:
        sides[line["split"]].add(tuple(line["prompt_ids"]))
    assert not sides["train"] & sides["held-out"]
    assert {side: len(prompts) for side, prompts in sides.items()} == {
        side: counts["conversations"] for side, counts in header["counts"].items()
    }
    answers = [c["answer_ids"] for c in conversations if c["split"] == "train"]
    assert sum(map(len, answers)) == header["counts"]["train"]["answer_tokens"]
