"""A directory that is there whole or not at all: written beside its place, then renamed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import StoreError
from ...io import LOCK, UNFINISHED, locked, put_in_place, refused


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
