"""Heads in files that ``torch.save`` wrote, as SafeAILab's: opened on request, and then without trust."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ...errors import HeadError, StoreError
from ...heads.files import TensorInfo
from .. import pickles

#: As in the header of a safetensors file; what else torch has is no weight or map of a head.
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped into memory; its pickle is looked through before anything is loaded.

    Raises:
        HeadError: the file is damaged, its pickle names more than tensors, or something in it is no tensor
            that a head can hold.
    """
    try:
        held = pickles.load(path)
    except StoreError as error:
        raise HeadError(str(error)) from None
    found: dict[str, Tensor] = {}
    for name, value in held.items():
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in _NAMES
        if not isinstance(name, str) or not plain:
            what = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise HeadError(
                f"{path} holds {what} under {str(name)[:60]!r}; a head's file holds its tensors alone"
            )
        found[name] = value.detach()
    total = sum(tensor.numel() * tensor.element_size() for tensor in found.values())
    if total > 2 * path.stat().st_size:  # two names may stand for one weight
        raise HeadError(f"{path} claims {total} bytes of tensors, more than the file holds")
    return found


def pickled_header(path: Path) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of such a file.

    Raises:
        HeadError: as `read_pickled`.
    """
    return {
        name: TensorInfo(tuple(tensor.shape), _NAMES[tensor.dtype])
        for name, tensor in read_pickled(path).items()
    }
