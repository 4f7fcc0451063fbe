"""Draft heads in other libraries' layouts: read, converted, written."""

from .convert import FORMATS, HeadConversion, HeadFormat, convert_head, layout_named
from .draft import TargetShape
from .open import HeadFlags, RawHead, open_head

__all__ = [
    "FORMATS",
    "HeadConversion",
    "HeadFlags",
    "HeadFormat",
    "RawHead",
    "TargetShape",
    "convert_head",
    "layout_named",
    "open_head",
]
