"""Other libraries' hidden-state dumps: recognised, described, and converted into one another.

A format of a plugin is written against `contract`.
"""

from .contract import DumpFormat
from .convert import Declared, DumpConversion, convert_dump
from .describe import FORMATS, DumpDescription, describe, recognised

__all__ = [
    "FORMATS",
    "Declared",
    "DumpConversion",
    "DumpDescription",
    "DumpFormat",
    "convert_dump",
    "describe",
    "recognised",
]
