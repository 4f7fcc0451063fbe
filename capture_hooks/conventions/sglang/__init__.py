"""SGLang, 0.5.9 to 0.5.23: what its layer ids mean, by family and version, and how it reads a config."""

from typing import Final

from ..contract import Convention
from . import dflash_table, eagle3_before, eagle3_today

#: In no particular order.
CONVENTIONS: Final[tuple[Convention, ...]] = (*eagle3_today.TODAY, *eagle3_before.BEFORE, *dflash_table.TABLE)

__all__ = ["CONVENTIONS"]
