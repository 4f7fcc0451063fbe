"""The draft vocabulary on disk: ``d2t`` and the ``t2d`` mask, in whichever form a file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..errors import HeadError

#: *identity*: the whole vocabulary, in order.  *lost*: zeros that a map was never written over.
Form = Literal["offset", "absolute", "identity", "lost"]
#: Up to this size, sorted offsets can rise at every step by chance.
_FEW = 64


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyOnDisk:
    """Which target tokens a head drafts: ``ids`` [D] int64 ascending, and the form they were found in."""

    ids: Tensor
    form: Form
    doubt: str | None = None


def read_vocabulary(
    tensors: Mapping[str, Tensor], draft_size: int, target_size: int, where: str
) -> VocabularyOnDisk:
    """The draft vocabulary of ``d2t`` and ``t2d``, in any library's form.

    Offsets are the form of EAGLE, SpecForge, speculators, ModelOpt, SGLang and vLLM; llama.cpp's converter
    and older NeMo exports hold absolute ids.  Zeros are the identity where D = V, and else a map that was
    never written (SafeAILab/EAGLE#222), unless ``t2d`` marks exactly the first D tokens.

    Raises:
        HeadError: the map is misshapen, out of range or contradicts ``t2d`` in every form.
    """
    d2t = tensors.get("d2t")
    if d2t is None or d2t.is_floating_point() or tuple(d2t.shape) != (draft_size,):
        return VocabularyOnDisk(check_vocabulary(tensors, draft_size, target_size, where), "identity")
    t2d = tensors.get("t2d")
    if not bool(d2t.any()):
        if draft_size == target_size:
            return VocabularyOnDisk(torch.arange(target_size), "identity")
        first = t2d is not None and tuple(t2d.nonzero().flatten().shape) == (draft_size,)
        if not (first and t2d is not None and bool(t2d[:draft_size].all())):
            return VocabularyOnDisk(torch.arange(draft_size), "lost")
    try:
        ids = check_vocabulary(tensors, draft_size, target_size, where)
    except HeadError:
        absolute = d2t.to(torch.int64) - torch.arange(draft_size)
        try:
            ids = check_vocabulary({**tensors, "d2t": absolute}, draft_size, target_size, where)
        except HeadError:
            pass
        else:
            return VocabularyOnDisk(ids, "absolute")
        raise
    rises = len(d2t) > _FEW and t2d is None and bool((d2t.diff() > 0).all())
    doubt = (
        "d2t rises at every step, as absolute ids do, and no t2d confirms that it holds offsets; "
        "it was read as offsets, as every server reads it"
    )
    return VocabularyOnDisk(ids, "offset", doubt if rises else None)


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
        ids = d2t.to(torch.int64) + torch.arange(draft_size, device=d2t.device)
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
