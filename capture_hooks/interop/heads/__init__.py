"""Draft heads in other libraries' layouts: read, converted, written."""

from .convert import FORMATS, Conversion, HeadFormat, convert_head, layout_named
from .draft import TargetShape
from .open import Flags, RawHead, open_head

__all__ = [
    "FORMATS",
    "Conversion",
    "Flags",
    "HeadFormat",
    "RawHead",
    "TargetShape",
    "convert_head",
    "layout_named",
    "open_head",
]
