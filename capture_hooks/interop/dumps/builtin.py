"""The formats that come with the core, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .contract import DumpFormat
from .modelopt import ModelOpt
from .ours import CaptureHooks
from .specforge import SpecForge
from .speculators import Speculators
from .speculators_files import SpeculatorsFiles
from .vllm import VLLM

_FORMATS: Final[tuple[DumpFormat, ...]] = (
    CaptureHooks(),
    Speculators(),
    SpeculatorsFiles(1),
    SpeculatorsFiles(0),
    SpecForge(),
    SpecForge(compressed=True),
    ModelOpt(),
    VLLM(),
)
FORMATS: Final[Mapping[str, DumpFormat]] = MappingProxyType({one.name: one for one in _FORMATS})
