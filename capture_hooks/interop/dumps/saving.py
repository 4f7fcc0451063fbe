"""Writing other libraries' files: on the disk when the block ends, with tensors that own their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import torch
from torch import Tensor

from ...io import refused
from ...store.stream import WRITE_BYTES

_ALIGNED: Final = 64


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
    """``torch.save``, in small writes.

    Raises:
        OSError: the system refused.
    """
    try:
        torch.save(content, cast(IO[bytes], _SmallWrites(file)))
    except RuntimeError as error:
        # torch's writer reports the failed write of a file object as its own error, with that one behind it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


class _SmallWrites:
    """A file to ``torch.save``, which hands over whole tensors."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        for at in range(0, len(whole), WRITE_BYTES):
            self._file.write(whole[at : at + WRITE_BYTES])
        return len(whole)

    def flush(self) -> None:
        self._file.flush()


class Copies:
    """Memory that is used again for each file's tensors: fresh pages would cost more than the copy."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, *tensors: Tensor) -> list[Tensor]:
        """Contiguous copies, each alone in its storage, valid until the next call.

        ``torch.save`` of a view would write all of the memory map behind it.
        """
        places, at = [], 0
        for tensor in tensors:
            places.append(at)
            at += -(tensor.numel() * tensor.element_size()) // _ALIGNED * -_ALIGNED
        if len(self._memory) < at:
            self._memory = bytearray(at)
        return [
            torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            .view(tensor.shape)
            .copy_(tensor)
            for tensor, place in zip(tensors, places, strict=True)
        ]
