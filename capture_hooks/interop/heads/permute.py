"""Moving a head's inputs: ``fc``'s columns and the norms before it go along, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import HeadError
from ...heads.order import depth_order
from ...spec import CaptureSpec
from .draft import Draft


def by_depth(draft: Draft) -> Draft:
    """The same head with its inputs in ascending depth, the order in which every server concatenates.

    Raises:
        SpecError: two inputs are one state, which every server captures once.
        HeadError: see `reordered`.
    """
    draft.spec.resolve(draft.target.n_layers)
    return reordered(draft, depth_order(draft.spec, draft.target.n_layers))


def reordered(draft: Draft, order: Sequence[int]) -> Draft:
    """The same head whose input i is the present input ``order[i]``.

    Raises:
        HeadError: ``fc`` is quantised in blocks, whose scales cannot be moved column by column.
    """
    if list(order) == list(range(len(order))):
        return draft
    tensors = dict(draft.tensors)
    if others := [n for n in tensors if n.startswith("fc.") and n not in ("fc.weight", "fc.bias")]:
        raise HeadError(f"the inputs must change places, and fc comes with {', '.join(others)}: not done")
    width = draft.fields["target_hidden_size"]
    columns = torch.cat([torch.arange(width) + index * width for index in order])
    tensors["fc.weight"] = _taken(tensors["fc.weight"], columns)
    if "input_norm.weight" in tensors:
        tensors["input_norm.weight"] = _taken(tensors["input_norm.weight"], columns)
    for place, index in enumerate(order):
        if f"fc_norm.{index}.weight" in draft.tensors:
            tensors[f"fc_norm.{place}.weight"] = draft.tensors[f"fc_norm.{index}.weight"]
    inputs = tuple(draft.spec.inputs[index] for index in order)
    return dataclasses.replace(draft, spec=CaptureSpec(inputs, draft.spec.target), tensors=tensors)


def _taken(tensor: Tensor, columns: Tensor) -> Tensor:
    """Columns of the last dimension, also of one-byte floats, which torch does not index."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.view(torch.uint8)[..., columns].view(tensor.dtype)
    return tensor[..., columns].contiguous()
