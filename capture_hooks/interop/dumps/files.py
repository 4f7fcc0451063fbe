"""What the dumps of other libraries share: files in order, each tensor checked, and how they are written.

Headers are bounded before they are parsed and tensors are mapped into memory.  A directory that is written is
there whole or not at all.
"""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import StoreError
from ...io import LOCK, UNFINISHED, check_regular, locked, put_in_place, refused
from ...store.shard import DTYPES, WRITE_BYTES
from .contract import Facts, Rows


def numbered(paths: Sequence[Path]) -> list[Path]:
    """The files in an order that is the same on every file system, ``data_2`` before ``data_10``."""

    def parts(path: Path) -> list[tuple[int, str]]:
        words = re.findall(r"\d+|\D+", str(path))
        return [(int(word), "") if word.isdigit() else (-1, word) for word in words]

    return sorted(paths, key=parts)


class FileSource(ABC):
    """A `Source` over files in the order given; all must hold states of one dtype and width.

    Raises:
        StoreError: there is no file, one is a pipe or a device, or the first is damaged.
    """

    def __init__(self, directory: Path, files: Sequence[Path]) -> None:
        if not files:
            raise StoreError(f"{directory} holds no file of this format")
        for path in files:
            check_regular(path)
        self.directory, self.files = directory, files
        self._extra: dict[str, Path] = {}
        first = self._read(files[0])
        self.facts = Facts(
            dtype=str(first.last.dtype).removeprefix("torch."),
            width=first.inputs.shape[1],
            hidden=first.last.shape[1],
            last=first.norm,
            dropped=self._dropped(),
        )

    def __len__(self) -> int:
        return len(self.files)

    def place(self, index: int) -> str:
        return str(self.files[index])

    def notes(self) -> tuple[str, ...]:
        extra = [
            f"left out, for the format has no such key: {key!r}, first in {path}"
            for key, path in self._extra.items()
        ]
        return (*_gaps(self.files), *extra)

    def tokens(self, index: int) -> tuple[Tensor, Tensor | None]:
        rows = self.rows(index)
        return rows.token_ids, rows.loss_mask

    def rows(self, index: int) -> Rows:
        path = self.files[index]
        rows, facts = self._read(path), self.facts
        if rows.inputs.dtype != rows.last.dtype:
            raise StoreError(
                f"{path} holds inputs of {rows.inputs.dtype} and a last hidden state of {rows.last.dtype}"
            )
        found = (str(rows.last.dtype).removeprefix("torch."), rows.inputs.shape[1], rows.last.shape[1])
        wanted = (facts.dtype, facts.width, facts.hidden)
        if found != wanted:
            raise StoreError(
                f"{path} holds {found[0]} states of {found[1]} + {found[2]} columns, {self.files[0]} "
                f"{wanted[0]} of {wanted[1]} + {wanted[2]}: one dump has one kind"
            )
        if rows.norm != facts.last:
            raise StoreError(
                f"{path} calls its last hidden state {rows.norm or 'neither normed nor unnormed'}, "
                f"{self.files[0]} {facts.last or 'neither'}: one dump has one kind"
            )
        return rows

    def _known(self, path: Path, found: Iterable[object], known: Collection[str]) -> None:
        """Remember the keys of a file that its format does not have."""
        for key in found:
            if key not in known:
                self._extra.setdefault(str(key), path)

    @abstractmethod
    def _read(self, path: Path) -> Rows:
        """One file, each tensor checked."""

    def _dropped(self) -> tuple[str, ...]:
        """What its files hold that no other format has a place for."""
        return ()


def _gaps(paths: Sequence[Path]) -> tuple[str, ...]:
    """Numbers that are missing in files called alike but for a number: ``data_1``, ``data_3``."""
    names = [re.fullmatch(r"(.*?)(\d{1,18})", path.name.partition(".")[0]) for path in paths]
    numbers = sorted({int(name[2]) for name in names if name})
    if not numbers or len({name and name[1] for name in names}) != 1:
        return ()
    lacking = numbers[-1] - numbers[0] + 1 - len(numbers)
    if not lacking:
        return ()
    first = next(number + 1 for number, after in pairwise(numbers) if after != number + 1)
    return (
        f"its files are numbered {numbers[0]} to {numbers[-1]}, and {lacking} of the numbers are missing, "
        f"the first {first}: if that is not meant, files were lost, or the dump was not finished",
    )


def tensor_in(path: Path, content: Mapping[str, Any], name: str) -> Tensor:
    """A tensor of a file's dict.

    Raises:
        StoreError: it has none of that name.
    """
    if not isinstance(value := content.get(name), Tensor):
        what = "has no" if value is None else f"has a {type(value).__name__} as"
        raise StoreError(f"{path} {what} {name!r}; its keys are {', '.join(map(str, content))}")
    return value


def token_ids(path: Path, ids: Tensor) -> Tensor:
    """Token ids as [T] int64.

    Raises:
        StoreError: they are not [T] integers, or none at all.
    """
    if ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32) or not len(ids):
        raise StoreError(f"{path}: token ids are [T] integers, not {tuple(ids.shape)} of {ids.dtype}")
    return ids.long().contiguous()


def marks(path: Path, mask: Tensor, tokens: int) -> Tensor:
    """A loss mask as [T] bool.

    Raises:
        StoreError: it is not [T] of 0 and 1.
    """
    if mask.shape != (tokens,) or (mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all())):
        raise StoreError(
            f"{path}: a loss mask of {tokens} tokens is ({tokens},) of 0 and 1, not {tuple(mask.shape)} "
            f"with values up to {mask.max() if mask.numel() else None}"
        )
    return mask.bool().contiguous()


def states(path: Path, name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> Tensor:
    """States of that shape (None for any size but 0), contiguous, in a dtype that can be stored.

    Raises:
        StoreError: they are anything else.
    """
    fits = tensor.ndim == len(shape) and all(
        found == wanted or (wanted is None and found)
        for found, wanted in zip(tensor.shape, shape, strict=False)
    )
    if not fits or tensor.dtype not in DTYPES.values() or tensor.layout != torch.strided:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise StoreError(
            f"{path}: {name} is ({wanted}) of {', '.join(DTYPES)}, not {tuple(tensor.shape)} of "
            f"{tensor.dtype}"
        )
    return tensor.contiguous()


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


_ALIGNED: Final = 64


@contextmanager
def saved(path: Path) -> Iterator[BinaryIO]:
    """A new file in a `fresh_directory`, which sees to it that its files are on the disk.

    Raises:
        StoreError: the system refused.
    """
    try:
        with open(path, "xb") as file:
            yield file
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


@contextmanager
def fresh_directory(destination: Path) -> Iterator[Path]:
    """An empty directory that takes the place of ``destination`` when the block ends well, else is removed.

    What a killed process left is removed too.

    Raises:
        StoreError: ``destination`` is there and not empty, another process writes it, or the system refused.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise StoreError(f"{destination} is there and not empty; give another directory, or remove this one")
    temporary = destination.with_name(destination.name + UNFINISHED)
    try:
        there = temporary.is_dir() and any(temporary.iterdir())
        if there and not (temporary / LOCK).exists():
            raise StoreError(f"{temporary} is in the way and was not begun by a conversion; remove it")
        temporary.mkdir(parents=True, exist_ok=True)
        with locked(temporary):
            try:
                _clear(temporary)
                yield temporary
                (temporary / LOCK).unlink()
                put_in_place(temporary, destination)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        raise refused(error, destination) from error


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
