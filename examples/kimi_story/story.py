"""The Kimi-K2.5 story, told by real SGLang on a CPU: one list of ids, two meanings, a fix that was the bug.

    python story.py [--acceptance [--prompts 8] [--tokens 48]] [--json FILE]

Run it with the Python of an environment that has SGLang 0.5.23 (``make sglang``).  Every state that reaches
the draft head is compared with every boundary of the Hugging Face model with the same weights, and named
after the nearest.  A claim that no longer holds ends the story.  ``--acceptance`` adds what a wrong list
costs a trained head.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import cpu_sglang
from cpu_sglang import PLUGIN, STOCK, Answer, generate, prefill, serve

TRUTH = ("post.2", "post.30", "post.58")
FAMILIES = ("deepseek_v2", "llama")
TOKENS = [5, 9, 20, 33, 77, 101, 60, 7, 3, 90, 41, 12]
#: Relative difference up to which two libraries hold the same float32 state.
SAME = 1e-5
SMOLLM2 = Path(__file__).parents[1] / "smollm2"


def claim(text: str, holds: bool) -> None:
    """Print what the numbers above it show, if they do."""
    if not holds:
        sys.exit(f"  => no longer so: {text}")
    print(f"  => {text}", flush=True)


def told(*points: str) -> dict[str, str]:
    """A server's environment with the plugin, told what to capture."""
    return {**PLUGIN, "CAPTURE_HOOKS_SPEC": ", ".join(points)}


class Story:
    """Its characters on disk, and what each chapter found."""

    def __init__(self, folder: Path) -> None:
        import models

        self.models, self.folder = models, folder
        self.targets = {family: folder / family for family in FAMILIES}
        built = {family: models.target(family, path) for family, path in self.targets.items()}
        self.states = {family: models.boundaries(model, TOKENS) for family, model in built.items()}
        self.head = folder / "head"
        models.head(built["deepseek_v2"], ", ".join(TRUTH), self.head)
        self.found: dict[str, Any] = {}

    def checkpoint(self, ids: list[int]) -> Path:
        """The head as most are published: with nothing but ids."""
        place = self.folder / "-".join(["checkpoint", *map(str, ids)])
        return place if place.exists() else self.models.checkpoint(self.head, ids, place)

    def serve(self, key: str, family: str, head: Path, environment: dict[str, str]) -> Answer:
        """Prefill `TOKENS` on a new server; print what each slot holds, or what stopped it."""
        answer = serve(self.targets[family], head, environment, prefill, TOKENS)
        self.found[key] = {"error": answer.error, "boundaries": []}
        for line in answer.error.replace("; slot", ";\nslot").splitlines():
            print(f"      {line}")
        if answer.value is not None:
            self.found[key] |= self.name_slots(answer.value, self.states[family])
        if answer.report is not None:
            self.found[key]["report"] = answer.report.model_dump()
        return answer

    @staticmethod
    def name_slots(stored: Any, states: list[Any]) -> dict[str, list[Any]]:
        """Name each slot of ``stored`` [T, K*H] after the nearest of ``states``, boundaries 0 to n-1."""
        import torch

        found: dict[str, list[Any]] = {"boundaries": [], "differences": [], "next": []}
        for number, slot in enumerate(torch.from_numpy(stored).split(states[0].shape[-1], dim=-1)):
            gaps = [float((slot - state).norm() / state.norm()) for state in states]
            nearest = min(range(len(gaps)), key=gaps.__getitem__)
            rest = min(gap for boundary, gap in enumerate(gaps) if boundary != nearest)
            name = f"pre.{nearest} = post.{nearest - 1}" if nearest else "embed"
            print(
                f"      slot {number} is {gaps[nearest]:.0e} from {name}, {rest:.2f} or more from every other"
            )
            for values, value in zip(found.values(), (nearest, gaps[nearest], rest), strict=True):
                values.append(value)
        return found

    def holds(self, key: str, *boundaries: int) -> bool:
        """Whether a run's slots are these boundaries."""
        run = self.found[key]
        return run["boundaries"] == list(boundaries) and max(run["differences"]) <= SAME

    # -- chapters ------------------------------------------------------------------------------------------

    def the_checkpoint(self) -> None:
        print("\n(a) A deepseek_v2 target on stock SGLang; the checkpoint's ids are [2, 30, 58]")
        self.serve("a", "deepseek_v2", self.checkpoint([2, 30, 58]), STOCK)
        claim(
            "pre.2, pre.30, pre.58: each slot one layer too early, and no error", self.holds("a", 2, 30, 58)
        )

    def with_the_plugin(self) -> None:
        print("\n(b) The same target with the plugin, and the head with its capture section")
        report = self.serve("b", "deepseek_v2", self.head, PLUGIN).report
        claim("the plugin reports", report is not None)
        print(
            f"      report: {', '.join(report.points)} at boundaries {report.boundaries}, {report.mechanism}"
        )
        for path in report.message.splitlines():
            print(f"      witness through {path.partition(': slot')[0]}")
        claim(
            "the truth, proven before it serves", self.holds("b", 3, 31, 59) and report.verdict == "matches"
        )
        print("    The checkpoint without a section, its ids still [2, 30, 58], told the truth by a setting")
        self.serve("b, told", "deepseek_v2", self.checkpoint([2, 30, 58]), told(*TRUTH))
        claim("the truth: the ids are not read", self.holds("b, told", 3, 31, 59))

    def the_wrong_fix(self) -> None:
        print("\n(c) The fix that was tried, the embedding and ids 2 and 30: [-1, 2, 30]")
        fixed = self.checkpoint([-1, 2, 30])
        print("    deepseek_v2, stock SGLang")
        error = self.serve("c, deepseek_v2", "deepseek_v2", fixed, STOCK).error
        claim("it stops at the first forward", "captured 2 of 3" in error)
        print("    llama, stock SGLang")
        self.serve("c, llama", "llama", fixed, STOCK)
        claim("embed, post.2, post.30, and no error", self.holds("c, llama", 0, 3, 31))
        print("    deepseek_v2 with the plugin, told embed, post.2, post.30, and this head's section")
        error = self.serve("c, plugin", "deepseek_v2", self.head, told("embed", "post.2", "post.30")).error
        named = all(f"slot {number} should hold {point}" in error for number, point in enumerate(TRUTH))
        claim("refused, all three slots named", named)

    def two_families(self) -> None:
        print("\n(d) The same ids, by the family of the target, on stock SGLang")
        rows = {
            (2, 30, 58): ("a", "d, llama"),
            (1, 30, 58): ("d, first is 1", "d, first is 1, llama"),
            (-1, 2, 30): ("c, deepseek_v2", "c, llama"),
        }
        for ids, keys in rows.items():
            for family, key in zip(FAMILIES, keys, strict=True):
                if key not in self.found:
                    print(f"    {family}, {list(ids)}")
                    self.serve(key, family, self.checkpoint(list(ids)), STOCK)
        print(f"\n      {'ids':14}{FAMILIES[0]:28}{FAMILIES[1]}")
        for ids, keys in rows.items():
            print(f"      {list(ids)!s:14}{self.reading(ids, keys[0]):28}{self.reading(ids, keys[1])}")
        claim(
            "two readings of one list, and on deepseek_v2 the first id decides that of the others",
            self.holds("d, llama", 3, 31, 59)
            and self.holds("d, first is 1", 2, 31, 59)
            and self.holds("d, first is 1, llama", 2, 31, 59),
        )

    def reading(self, ids: tuple[int, ...], key: str) -> str:
        """How each id was read: as what enters that layer or as what leaves it."""
        run = self.found[key]
        if run["error"]:
            return "stops"
        pairs = zip(ids, run["boundaries"], strict=True)
        return ", ".join("embed" if b == 0 else f"pre.{i}" if b == i else f"post.{b - 1}" for i, b in pairs)

    def acceptance(self, prompts: int, tokens: int) -> None:
        print(
            f"\n(e) A trained head on SmolLM2-135M: {prompts} held-out prompts, {tokens} greedy tokens each"
        )
        shipped, job = SMOLLM2 / "head", (generate, held_out(prompts), tokens)
        rows = self.found["e"] = {}
        lists = {"right": [2, 15, 27], "off by one": [3, 16, 28], "embedding first": [-1, 2, 15]}
        for name, ids in lists.items():
            for who, environment in (("stock", STOCK), ("plugin", PLUGIN)):
                place = self.folder / f"smollm2 {name} {who}"
                # The plugin is given the whole head, its ids edited by hand: what its section says is served.
                head = self.models.checkpoint(shipped, ids, place, section=environment is PLUGIN)
                rows[f"{who}: ids {ids} ({name})"] = (head, environment)
        for name, (head, environment) in rows.items():
            answer = serve(SMOLLM2.parents[1] / "build" / "smollm2", head, environment, *job)
            if answer.error:
                sys.exit(f"      {name}: {answer.error}")
            # Tokens gained by passes of target verify; the first one is the prefill's.
            length = sum(len(new) - 1 for new, _ in answer.value) / sum(passes for _, passes in answer.value)
            print(f"      {name:58} acceptance length {length:.3f}", flush=True)
            rows[name] = {"length": length, "outputs": [new for new, _ in answer.value]}
        right, *others = rows.values()
        claim("the same text from every server", all(row["outputs"] == right["outputs"] for row in others))
        served = {row["length"] for name, row in rows.items() if name.startswith("plugin")}
        claim("with the plugin, that of the right ids whatever the list says", served == {right["length"]})


def held_out(count: int) -> list[list[int]]:
    """The first prompts that the head was not trained on."""
    with gzip.open(SMOLLM2 / "conversations.jsonl.gz", "rt") as lines:
        next(lines)  # provenance
        conversations = [json.loads(line) for line in lines]
    return [c["prompt_ids"] for c in conversations if c["split"] == "held-out"][:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--acceptance", action="store_true", help="serve SmolLM2 too (build/smollm2)")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="keep what was found there")
    options = parser.parse_args()
    cpu_sglang.prepare()
    with tempfile.TemporaryDirectory() as folder:
        print(
            f"Two random targets of 61 layers; a head for the deepseek_v2 one, trained on {', '.join(TRUTH)}"
        )
        story = Story(Path(folder))
        story.the_checkpoint()
        story.with_the_plugin()
        story.the_wrong_fix()
        story.two_families()
        if options.acceptance:
            story.acceptance(options.prompts, options.tokens)
    if options.json:
        options.json.write_text(json.dumps(story.found, indent=1) + "\n")


if __name__ == "__main__":
    main()
