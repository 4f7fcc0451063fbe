"""The draft vocabulary: the most frequent tokens of the training data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from capture_hooks.errors import DataError


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """``ids`` [D] int64 ascending target ids, and ``coverage``, the share of counted tokens they are."""

    ids: Tensor
    coverage: float


def choose_draft_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The ``size`` most frequent tokens of ``counts`` [V]; ties go to the smaller id.

    Raises:
        DataError: when ``size`` is not in 1..V, or nothing was counted.
    """
    if not 1 <= size <= counts.shape[0]:
        raise DataError(
            f"draft vocabulary size {size} must lie in 1..{counts.shape[0]} (the target's vocabulary)"
        )
    total = int(counts.sum())
    if total == 0:
        raise DataError(
            "the data has no token to learn (its loss mask is empty), so no draft vocabulary can be chosen"
        )
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size]
    return DraftVocabulary(chosen.sort().values, int(counts[chosen].sum()) / total)
