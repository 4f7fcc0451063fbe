"""SGLang, 0.5.9 to 0.5.23: what its layer ids mean, by family and version, and how it reads a config."""

from typing import Final

from ..contract import Convention
from .history import EAGLE3

#: In no particular order.
CONVENTIONS: Final[tuple[Convention, ...]] = EAGLE3

__all__ = ["CONVENTIONS"]
