"""Import-only stand-in for torchvision: PyPI's build does not load against the CPU build of torch.

SGLang imports names of torchvision at the top of its image processors.  Here every submodule and every name
can be imported, classes can be subclassed, and nothing works: a call raises.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

#: Readers compare it; the newest that torch 2.13 would go with.
__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """Read at import time as default arguments, so it has to be an enumeration."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name}: this torchvision is the import-only stand-in of capture-hooks-sgl-kernel-cpu; "
        "images need the real one"
    )


def _stand_in(module: str, name: str) -> Any:
    """A class for a name in capitals, a function for any other; both refuse to be called."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if name == "InterpolationMode":
        return InterpolationMode
    full = f"{module}.{name}"

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(full)

    if name[0].isupper():
        return type(name, (), {"__module__": module, "__init__": refuse})
    refuse.__name__ = refuse.__qualname__ = name
    return refuse


class _Module(ModuleType):
    """A submodule in which every name is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        value = _stand_in(self.__name__, name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every ``torchvision.…``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are made when asked for."""


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    return _stand_in(__name__, name)
