"""Writing other libraries' files: on the disk when the block ends, with tensors that own their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from ..files import refused


@contextmanager
def saved(path: Path) -> Iterator[BinaryIO]:
    """A new file, on the disk when the block ends.

    Raises:
        StoreError: the system refused.
    """
    try:
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise refused(error, path) from error


def save_dict(content: dict[Any, Any], file: IO[bytes]) -> None:
    """``torch.save``.

    Raises:
        OSError: the system refused.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch's writer reports the failed write of a file object as its own error, with that one behind it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def owned(tensor: Tensor) -> Tensor:
    """A contiguous copy: ``torch.save`` of a view would write all of the memory map behind it."""
    return tensor.clone(memory_format=torch.contiguous_format)
