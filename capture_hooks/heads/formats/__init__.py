"""Draft heads in other libraries' layouts: read, converted, written."""

from .contract import Flags, Layout, RawHead, Stored
from .open import open_head

__all__ = ["Flags", "Layout", "RawHead", "Stored", "open_head"]
