"""Dumps of one file for each sequence: their order, and what every file must be."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import StoreError
from ...io import check_regular
from ...store.shard import DTYPES
from .contract import Facts, Rows


def numbered(paths: Sequence[Path]) -> list[Path]:
    """In one order on every file system, ``data_2`` before ``data_10``."""

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
