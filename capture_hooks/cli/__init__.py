"""Command line: thin, no logic."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the ``capture-hooks`` command.

    A user's error is one message and exit code 1, a usage error exit code 2; a reader that went away
    (``| head``) and Ctrl-C end it quietly.  A traceback is always a bug.
    """
    try:
        from .app import build
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {error.name}: pip install 'capture-hooks[cli]'")
    from ..errors import CaptureHooksError

    try:
        try:
            build(sys.argv[1:])(prog_name="capture-hooks")
        finally:
            sys.stdout.flush()  # a broken pipe shows here, not while the interpreter shuts down
    except CaptureHooksError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as typer does when it meets one first
