"""What every forward worker is told: ``TARGET``, then ``HEAD STATES OUT``, three words for each head.

TARGET is a model's directory, which only engines look at.  STATES is a safetensors file: ``states`` [T, K*H]
the captured inputs by depth, ``next_ids`` [T], ``embedding`` [V, H] the target's table.  OUT gets ``logits``
[T, D], of one step over the whole sequence; from an engine also ``token_ids`` [D], the target's token of each
column, and ``fed_back`` [T, H], the states that the next step would read.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TARGET = sys.argv[1]


def forward_all(outputs_of: Callable[[Path, dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Run ``outputs_of(head, states)`` for each head of the command line."""
    words = sys.argv[2:]
    for head, states, out in zip(words[::3], words[1::3], words[2::3], strict=True):
        with torch.no_grad():
            found = outputs_of(Path(head), load_file(states))
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, out)


def causal(rows: int) -> Tensor:
    """[1, 1, T, T] added to scores: the lowest float where a row must not look."""
    mask = torch.full((rows, rows), torch.finfo(torch.float32).min).triu(1)
    return mask[None, None]
