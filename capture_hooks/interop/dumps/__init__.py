"""Other libraries' hidden-state dumps: recognised, described, and converted into one another."""

from .contract import DumpFormat, Facts, Meaning, NormState, Plan, Rows, Source
from .convert import Conversion, convert_dump
from .declared import Declared
from .describe import DumpDescription, describe, recognised

__all__ = [
    "Conversion",
    "Declared",
    "DumpDescription",
    "DumpFormat",
    "Facts",
    "Meaning",
    "NormState",
    "Plan",
    "Rows",
    "Source",
    "convert_dump",
    "describe",
    "recognised",
]
