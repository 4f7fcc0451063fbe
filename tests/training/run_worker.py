"""The same small run, for tests in this process and in others; as a script: DIRECTORY MODE."""

import sys
import time
from pathlib import Path

import torch

from capture_hooks.store import Example, Examples
from capture_hooks.testing import tiny
from capture_hooks.training import TrainConfig, train

SPEC = "post.0, post.1, post.2"


def target(seed=0):
    """A random Llama of four layers whose logits are sharp enough to have a favourite token."""
    return tiny.llama(num_hidden_layers=4, seed=seed)


def examples(count=24, seed=0, prompts=None):
    """Random tokens of mixed length, the first ones being the prompt."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for number in range(count):
        length = int(torch.randint(8, 40, (), generator=generator))
        ids = torch.randint(tiny.VOCAB, (length,), generator=generator)
        if prompts is not None:
            ids[:3] = torch.tensor([number % prompts, 1, 2])
        items.append(Example(ids, torch.arange(length) >= 3, f"example {number}"))
    return Examples("random", tuple(items))


def config(**changed):
    """Six steps of a small EAGLE-3 head, with noise in them."""
    settings = {
        "spec": SPEC,
        "head_config": {"steps": 2, "feature_noise": 0.1},
        "steps": 6,
        "batch_tokens": 150,
        "lr": 0.01,
        "held_out": 0.2,
        "evaluations": 2,
        "log_steps": 1,
        "save_steps": 2,
    }
    return TrainConfig(**(settings | changed))


class HoldAt:
    """A reporter that waits for good at a step, so that the process can be killed there."""

    def __init__(self, step):
        self.step = step

    def estimated(self, estimate):
        pass

    def logged(self, values):
        if values["step"] == self.step:
            time.sleep(600)


if __name__ == "__main__":
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "hold":
        train(target(), examples(), config(), out=directory / "head", reporter=HoldAt(5))
    else:
        quiet = config(head_config={"steps": 2, "feature_noise": 0.0})
        train(target(), examples(), quiet, out=directory / "head")
