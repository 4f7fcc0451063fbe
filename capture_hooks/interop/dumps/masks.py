"""Loss masks from one library's use to another's.

Every library's own data preparation marks tokens: ``loss_mask[t]`` is 1 where x[t] was written by the
assistant.  Their trainers differ in which prediction a mark decides: the one of x[p] is weighted by
``loss_mask[p - lag]`` with the lag of `Meaning.mask_lag`.  So either the marks stay the same, or the losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import StoreError


def same_losses(mask: Tensor, lag: int, new_lag: int, place: str) -> Tensor:
    """The mask [T] under which a trainer of ``new_lag`` counts the predictions that one of ``lag`` counts.

    A head's row t predicts x[t+2] and later ones, so nothing is predicted before x[2]; the last prediction is
    that of x[T], whose distribution the target's last row gives although the token is not there.

    Raises:
        StoreError: a prediction counts that the other trainer has no mark for.
    """
    tokens = len(mask)
    predicted = mask.nonzero().flatten() + lag
    marked = predicted[(predicted >= 2) & (predicted <= tokens)] - new_lag
    if bool((marked >= tokens).any()):
        raise StoreError(
            f"{place}: its mask counts the prediction of what follows the last token, which a trainer of the "
            "destination never makes, so that loss would be lost; keep the marks instead (--keep-mask marks)"
        )
    moved = torch.zeros_like(mask)
    moved[marked] = True
    return moved
