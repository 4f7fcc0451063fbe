"""The values of one tensor, where a check needs them."""

from __future__ import annotations

from torch import Tensor

from ...heads import RawHead
from ...heads.open import read_stored


def tensor(head: RawHead, name: str) -> Tensor:
    """One tensor of a head, by canonical name.

    Raises:
        HeadError: its file is damaged.
    """
    stored = head.names[name]
    return read_stored(stored.file, (stored.name,))[stored.name]
