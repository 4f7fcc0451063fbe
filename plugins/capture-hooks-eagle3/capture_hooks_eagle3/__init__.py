"""The EAGLE-3 / EAGLE-3.1 draft head."""

from .config import Eagle3Config
from .head import Eagle3Head

__all__ = ["Eagle3Config", "Eagle3Head"]
