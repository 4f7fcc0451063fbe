"""Draft heads in other libraries' layouts: read, converted, written."""

from .contract import Flags, Layout, RawHead, Stored
from .convert import Conversion, convert_head
from .draft import Target
from .layouts import WRITERS, layout_named
from .open import open_head

__all__ = [
    "WRITERS",
    "Conversion",
    "Flags",
    "Layout",
    "RawHead",
    "Stored",
    "Target",
    "convert_head",
    "layout_named",
    "open_head",
]
