"""The draft vocabulary in whichever form a file has it: offsets, absolute ids, none, or lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...errors import HeadError
from ...heads.vocabulary import check_vocabulary

#: *identity*: the whole vocabulary, in order.  *lost*: zeros that a map was never written over.
Form = Literal["offset", "absolute", "identity", "lost"]
#: Up to this size, sorted offsets can rise at every step by chance.
_FEW = 64


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """Which target tokens a head drafts: ``ids`` [D] int64 ascending, and the form they were found in."""

    ids: Tensor
    form: Form
    doubt: str | None = None


def read_vocabulary(
    tensors: Mapping[str, Tensor], draft_size: int, target_size: int, where: str
) -> DraftVocabulary:
    """The draft vocabulary of ``d2t`` and ``t2d``, in any library's form.

    Offsets are the form of EAGLE, SpecForge, speculators, ModelOpt, SGLang and vLLM; llama.cpp's converter
    and older NeMo exports hold absolute ids.  Zeros are the identity where D = V, and else a map that was
    never written (SafeAILab/EAGLE#222), unless ``t2d`` marks exactly the first D tokens.

    Raises:
        HeadError: the map is misshapen, out of range or contradicts ``t2d`` in every form.
    """
    d2t = tensors.get("d2t")
    if d2t is None or d2t.is_floating_point() or tuple(d2t.shape) != (draft_size,):
        return DraftVocabulary(check_vocabulary(tensors, draft_size, target_size, where), "identity")
    t2d = tensors.get("t2d")
    if not bool(d2t.any()):
        if draft_size == target_size:
            return DraftVocabulary(torch.arange(target_size), "identity")
        first = t2d is not None and tuple(t2d.nonzero().flatten().shape) == (draft_size,)
        if not (first and t2d is not None and bool(t2d[:draft_size].all())):
            return DraftVocabulary(torch.arange(draft_size), "lost")
    try:
        ids = check_vocabulary(tensors, draft_size, target_size, where)
    except HeadError:
        absolute = d2t.to(torch.int64) - torch.arange(draft_size)
        try:
            ids = check_vocabulary({**tensors, "d2t": absolute}, draft_size, target_size, where)
        except HeadError:
            pass
        else:
            return DraftVocabulary(ids, "absolute")
        raise
    rises = len(d2t) > _FEW and t2d is None and bool((d2t.diff() > 0).all())
    doubt = (
        "d2t rises at every step, as absolute ids do, and no t2d confirms that it holds offsets; "
        "it was read as offsets, as every server reads it"
    )
    return DraftVocabulary(ids, "offset", doubt if rises else None)
