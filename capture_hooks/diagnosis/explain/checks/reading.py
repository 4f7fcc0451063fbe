"""The values of one tensor, where a check needs them."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ....errors import HeadError
from ....heads.formats import RawHead


def tensor(head: RawHead, name: str) -> Tensor:
    """One tensor of a head, by canonical name.

    Raises:
        HeadError: its file is damaged.
    """
    stored = head.names[name]
    try:
        with safe_open(stored.file, framework="pt") as file:
            found: Tensor = file.get_tensor(stored.name)
    except (OSError, SafetensorError) as error:
        raise HeadError(f"{stored.file} is damaged, truncated or no safetensors file: {error}") from None
    return found
