"""``python -m MODULE``, which ends with the process that started it.

A process that is killed cannot stop what it started: a resumed dump would find the accelerators in use.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def bound_command(module: str, words: Sequence[str]) -> list[str]:
    """The command that runs ``module`` with ``words`` for as long as this process lives."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *words]


def end_with(parent: int) -> None:
    """End this process when ``parent``, which started it, has ended; at once where it has already (Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be watched
            sys.exit(1)


def main() -> None:
    """Run a module; the arguments before its own are the process it belongs to, and its name."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    del sys.argv[1:3]
    end_with(parent)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
