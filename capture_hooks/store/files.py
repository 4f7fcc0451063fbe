"""Writing that either happened or did not: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import CaptureHooksError, StoreError

#: Ending of unfinished files; never read, removed when a dump is resumed.
UNFINISHED = ".unfinished"
LOCK = ".lock"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes ``path``'s place when the block ends; after an error ``path`` is as it was.

    Raises:
        StoreError: ``path`` is there and no regular file (a device, which would be gone), or the system
            refused (permission, space, quota), in one line.
    """
    if path.exists() and not path.is_file():
        raise StoreError(f"{path} is no regular file, so no file is put in its place; give another name")
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise refused(error, path) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_regular(path: Path, error: type[CaptureHooksError] = StoreError) -> None:
    """Refuse what is there and no regular file, before it is opened: a pipe blocks, a device never ends.

    Raises:
        StoreError, or whatever ``error`` is: naming the path.
    """
    if path.exists() and not path.is_file():
        raise error(f"{path} is no regular file; a pipe or a device could be read for ever")


def sync_directory(directory: Path) -> None:
    """Make renames in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold ``directory`` for one writer; the system lets go when the process ends, however it ends.

    Raises:
        StoreError: another process is writing there, or the directory cannot be written.
    """
    path = directory / LOCK
    try:
        file = open(path, "w")  # noqa: SIM115  # held open for the length of the lock
    except OSError as error:
        raise refused(error, path) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
        except (BlockingIOError, FileNotFoundError):
            held = False  # taken, or taken and given back between our two looks
        if not held:
            raise StoreError(f"{directory}: another process is writing this dump; wait for it or stop it")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def refused(error: OSError, path: Path) -> StoreError:
    """The one line that a user reads when the system refuses a write."""
    reasons = {
        errno.ENOSPC: "no space left on the device",
        errno.EDQUOT: "the disk quota is used up",
        errno.EFBIG: "the file would be larger than is allowed here",
        errno.EROFS: "the file system is read-only",
        errno.EACCES: "permission denied",
        errno.EPERM: "permission denied",
        errno.EEXIST: "a file of that name is in the way",
        errno.ENOTDIR: "a part of the path is a file, not a directory",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    finished = "; what was complete before is intact, and the same command continues there"
    again = finished if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return StoreError(f"cannot write {path}: {reason}{again}")
