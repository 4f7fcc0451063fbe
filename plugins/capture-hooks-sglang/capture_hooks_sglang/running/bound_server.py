"""``python -m sglang.launch_server``, which ends with the process that started it.

Whoever is killed cannot stop what it started: a dump that is resumed would find the accelerators taken.
SGLang's own processes end with their parent in the same way (``kill_itself_when_parent_died``).
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def main() -> None:
    """Run the server; the first argument is the process it belongs to."""
    parent = int(sys.argv.pop(1))
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be watched
            sys.exit(1)
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
