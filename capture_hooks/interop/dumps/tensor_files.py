"""safetensors files of one sequence: headers bounded before they are parsed, tensors mapped into memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import StoreError
from ...io import check_regular

#: Two tensors take under 300 bytes; metadata may be added.
_HEADER_BYTES: Final = 2**20


def tensor_names(path: Path) -> frozenset[str]:
    """Names of a file's tensors.

    Raises:
        StoreError: it is damaged.
    """
    return frozenset(_read(path, None))


def read_tensors(path: Path, names: Sequence[str]) -> list[Tensor]:
    """The named tensors, as views into a private memory map.

    Raises:
        StoreError: the file is damaged, or has no such tensor.
    """
    found = _read(path, names)
    return [found[name] for name in names]


def _read(path: Path, names: Sequence[str] | None) -> dict[str, Tensor]:
    """The named tensors; None for empty ones under every name."""
    check_regular(path)
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > min(_HEADER_BYTES, path.stat().st_size):
            raise StoreError(f"{path} is damaged, or no dump: it claims a header of {header} bytes")
        # A tensor made in inference mode could never take part in training.
        with torch.inference_mode(False), safe_open(path, framework="pt") as opened:
            present = list(opened.keys())
            if names is None:
                return dict.fromkeys(present, torch.empty(0))
            if missing := sorted(set(names) - set(present)):
                raise StoreError(f"{path} has no tensor {missing[0]!r}; it has {', '.join(sorted(present))}")
            return {name: opened.get_tensor(name) for name in names}
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error})") from None
