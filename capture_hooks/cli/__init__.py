"""The command line: parses options, calls the rooms below, prints what they return."""

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

__all__ = ["main"]

#: If this variable is set, an unforeseen error is shown with its traceback.
TRACEBACK: Final = "CAPTURE_HOOKS_TRACEBACK"
#: The extra that brings a library which is no requirement of the core's.
_EXTRAS: Final = {
    "typer": "cli",
    "rich": "cli",
    "transformers": "train",
    "accelerate": "train",
    "datasets": "train",
    "tokenizers": "train",
    "jinja2": "train",
}
#: What a full disk, a quota or a limit of the process says of a file, which it does not name.
_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``capture-hooks`` command on ``arguments`` (default: the process's own), and exit.

    A user's error is one message and exit code 1, a usage error exit code 2; a reader that went away
    (``| head``) and Ctrl-C end it quietly.  Any other error is a bug and is reported as one, with exit
    code 1, and ``CAPTURE_HOOKS_TRACEBACK=1`` shows where it happened.
    """
    try:
        try:
            _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # a broken pipe shows here, not while the interpreter shuts down
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as typer does when it meets one first
    except OSError as error:  # of the last flush
        print(f"error: cannot write to the standard output: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run(arguments: list[str]) -> None:
    from ..errors import CaptureHooksError

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files are bytes, not always text
    if any("\0" in word for word in arguments):
        _fail("an argument holds a null byte")
    try:
        from .app import build

        build(arguments)(arguments, prog_name="capture-hooks")
    except (BrokenPipeError, SystemExit):
        raise
    except CaptureHooksError as error:
        _fail(str(error))
    except Exception as error:
        _fail(_foreseen(error) or _unforeseen(error))


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def _foreseen(error: Exception) -> str | None:
    """What can be wrong anywhere: a library that is not installed, memory that is not there."""
    if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get(error.name or "")):
        what = "the command line" if extra == "cli" else "this command"
        return f"{what} needs {error.name}: pip install 'capture-hooks[{extra}]'"
    # torch.OutOfMemoryError is a GPU's; a CPU's is a plain RuntimeError.
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot use {os.fsdecode(error.filename)}: {error.strerror or error}"
    if isinstance(error, OSError) and error.errno in _DISK:
        return f"a file, or the standard output, cannot be written: {error.strerror}"
    text, name = str(error), type(error).__name__
    if isinstance(error, MemoryError) or "OutOfMemory" in name or "can't allocate memory" in text:
        return f"out of memory{': ' + _first_line(text) if text else ''}"
    return None


def _unforeseen(error: Exception) -> str:
    """One line for what is a bug, and where it came from; with the traceback where that is asked for."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {_first_line(str(error))}"
    return (
        f"unexpected {what} ({place.filename}:{place.lineno}). This is a bug of capture-hooks, or of a "
        f"library it calls; please report it with what {TRACEBACK}=1 shows"
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
