"""Where vLLM meets the plugin: called in each of its processes (entry-point group ``vllm.general_plugins``).

Nothing of vLLM is imported or changed unless a setting asks: `HEAD` names a head that must be fed what it was
trained on, ``CAPTURE_HOOKS_HANDSHAKE`` a directory for reports.
"""

from __future__ import annotations

import multiprocessing
import os

from . import HEAD


def activate() -> None:
    """Follow the workers of this process, where that was asked for."""
    if os.environ.get(HEAD) or os.environ.get("CAPTURE_HOOKS_HANDSHAKE"):
        from .serving.host import follow_workers

        _end_with_parent()
        follow_workers()


def _end_with_parent() -> None:
    """End this process with the one that started it: vLLM's engine and workers would outlive it."""
    spawner = multiprocessing.parent_process()
    if spawner is not None and spawner.pid is not None:
        from capture_hooks.engines.bound import end_with

        end_with(spawner.pid)
