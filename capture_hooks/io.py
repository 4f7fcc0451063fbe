"""Files and directories that are there whole or not at all, one writer at a time.

What is written goes under a temporary name, is made to survive a power cut (fsync), and takes its place by a
rename.  The errors are of the class that the caller names, in one line.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

from .errors import CaptureHooksError, StoreError

#: Ending of unfinished files; never read, removed when a dump is resumed.
UNFINISHED = ".unfinished"
LOCK = ".lock"


@contextmanager
def replacing(path: Path, kind: type[CaptureHooksError] = StoreError) -> Iterator[BinaryIO]:
    """A file that takes ``path``'s place when the block ends; after an error ``path`` is as it was.

    Raises:
        kind: ``path`` is there and no regular file (a device, which would be gone), or the system
            refused (permission, space, quota), in one line.
    """
    if path.exists() and not path.is_file():
        raise kind(f"{path} is no regular file, so no file is put in its place; give another name")
    temporary = path.with_name(path.name + UNFINISHED)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise refused(error, path, kind) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def replacing_directory(directory: Path, check: Callable[[], None]) -> Iterator[Path]:
    """An empty directory that takes the place of ``directory`` when the block ends.

    After an error ``directory`` is as it was.  A process that is killed may leave hidden siblings behind, the
    old directory whole among them.

    Args:
        directory: its absolute path.
        check: raises where what is there may not be replaced; called before the block and after it.

    Raises:
        OSError: the system refused.
    """
    check()
    fresh = directory.with_name(f".{directory.name}.new-{secrets.token_hex(4)}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        fresh.mkdir()
        yield fresh
        check()
        put_in_place(fresh, directory)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def put_in_place(fresh: Path, directory: Path) -> None:
    """Rename a complete directory to ``directory``, with all in it on disk.

    What is there is moved aside first, and moved back if the new one cannot take its place; a process killed
    between the two leaves both, complete, as hidden siblings.

    Raises:
        OSError: the system refused.
    """
    for path in (*fresh.rglob("*"), fresh):
        sync(path)
    old = directory.with_name(f".{directory.name}.old-{secrets.token_hex(4)}")
    replaces = directory.exists()
    if replaces:
        directory.rename(old)
    try:
        fresh.rename(directory)
    except OSError:
        if replaces:
            old.rename(directory)
        raise
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power cut.

    Raises:
        OSError: the system refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hand_over(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` make a file under another name, and rename it, for a process that waits for ``path``.

    Such a file is read once and at once, so nothing waits for the disk.

    Raises:
        OSError: the system refused.
    """
    unfinished = path.with_suffix(UNFINISHED)
    write(unfinished)
    os.replace(unfinished, path)


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
            held = lock(file) and os.fstat(file.fileno()).st_ino == os.stat(path).st_ino
        except FileNotFoundError:
            held = False  # taken and given back between our two looks
        if not held:
            raise StoreError(f"{directory}: another process is writing this dump; wait for it or stop it")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def lock(file: IO[Any]) -> bool:
    """Whether this process alone now holds an open file; it lets go when the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_regular(path: Path, kind: type[CaptureHooksError] = StoreError) -> None:
    """Refuse what is there and no regular file, before it is opened: a pipe blocks, a device never ends.

    Raises:
        kind: naming the path.
    """
    if path.exists() and not path.is_file():
        raise kind(f"{path} is no regular file; a pipe or a device could be read for ever")


def files_within(directory: Path, *endings: str, folders: int = 10_000) -> Iterator[Path]:
    """Files in ``directory`` and below it whose names end so, in its first ``folders`` folders.

    This answers what a directory is.  Without a bound the question would walk a whole disk where it is ``/``.
    """
    for folder, _, names in islice(os.walk(directory), folders):
        yield from (Path(folder, name) for name in names if name.endswith(endings))


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def refused(error: OSError, path: Path, kind: type[CaptureHooksError] = StoreError) -> CaptureHooksError:
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
    return kind(f"cannot write {path}: {reason}{again}")
