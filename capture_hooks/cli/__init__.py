"""Command line: thin, no logic."""

import sys


def main() -> None:
    """Run the ``capture-hooks`` command; a missing extra or a user's error is one line, not a traceback."""
    try:
        from .app import build
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"error: the command line needs {error.name}: pip install 'capture-hooks[cli]'")
    from ..errors import CaptureHooksError

    try:
        build()()
    except CaptureHooksError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
