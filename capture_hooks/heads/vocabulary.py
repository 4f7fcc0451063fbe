"""The draft vocabulary on disk: ``d2t`` offsets and the ``t2d`` mask."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import HeadError


def check_vocabulary(tensors: Mapping[str, Tensor], draft_size: int, target_size: int, where: str) -> Tensor:
    """Check ``d2t`` and ``t2d`` against each other and the sizes.

    ``d2t`` [D] holds offsets: draft id i stands for target id ``i + d2t[i]``, ascending, as in EAGLE,
    SpecForge, SGLang and vLLM.  ``t2d`` [V] is true at those target ids.  A head that drafts the whole
    vocabulary carries neither (vLLM 0.33 refuses a ``d2t`` there).

    Returns:
        [D] int64: the target ids, ascending.

    Raises:
        HeadError: naming what disagrees and both values.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if draft_size != target_size:
            raise HeadError(
                f"{where}: no d2t, and draft_vocab_size {draft_size} differs from vocab_size {target_size}"
            )
        ids = torch.arange(target_size)
    else:
        if d2t.is_floating_point() or tuple(d2t.shape) != (draft_size,):
            raise HeadError(
                f"{where}: d2t is {_describe(d2t)}; "
                f"draft_vocab_size {draft_size} asks for [{draft_size}] integers"
            )
        ids = d2t.to(torch.int64) + torch.arange(draft_size)
        _check_ids(ids, d2t, target_size, where)
    if t2d is not None:
        if tuple(t2d.shape) != (target_size,) or t2d.dtype not in (torch.bool, torch.uint8, torch.int64):
            raise HeadError(
                f"{where}: t2d is {_describe(t2d)}; "
                f"vocab_size {target_size} asks for [{target_size}] booleans"
            )
        marked = t2d.nonzero().flatten()
        if not torch.equal(marked, ids):
            raise HeadError(f"{where}: t2d marks {_some(marked, ids)}, and d2t names {_some(ids, marked)}")
    return ids


def _check_ids(ids: Tensor, d2t: Tensor, target_size: int, where: str) -> None:
    if len(ids) > 1 and int(ids.diff().min()) <= 0:
        at = int((ids.diff() <= 0).nonzero()[0])
        raise HeadError(
            f"{where}: d2t does not give ascending target ids: draft ids {at} and {at + 1} stand for "
            f"{int(ids[at])} and {int(ids[at + 1])}"
        )
    low, high = int(ids[0]), int(ids[-1])
    if low < 0 or high >= target_size:
        # Absolute ids rise strictly; offsets of sorted ids repeat wherever two neighbours are both kept.
        absolute = len(d2t) > 1 and int(d2t.diff().min()) > 0 and int(d2t[-1]) < target_size
        hint = "; these look like absolute ids: subtract arange" if absolute else ""
        raise HeadError(
            f"{where}: d2t gives target ids {low}..{high}, outside a vocabulary of {target_size}{hint}"
        )


def _some(mine: Tensor, theirs: Tensor) -> str:
    """A set's size, and one member that the other lacks."""
    extra = mine[~torch.isin(mine, theirs)]
    return f"{len(mine)} ids" + (f" with {int(extra[0])} among them" if len(extra) else "")


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
