"""SGLang plugin (entry point group ``sglang.srt.plugins``): attention kernels without AMX."""

from __future__ import annotations

import os

#: Set to 1 to let ``--attention-backend intel_amx`` through on a CPU without AMX.
VARIABLE = "SGL_KERNEL_CPU_ATTENTION"


def enable_attention() -> None:
    """Say that this platform has AMX, where `VARIABLE` asks for it; SGLang calls this once per process.

    SGLang 0.5.23 swaps ``intel_amx`` for ``torch_native`` where ``get_platform().has_amx`` is false
    (``srt/arg_groups/overrides.py``), and EAGLE needs ``intel_amx`` (``srt/speculative/draft_utils.py``).
    That fact is read for choosing backends alone: code that packs weights for AMX asks
    ``cpu_has_amx_support()``, which stays false.
    """
    if os.environ.get(VARIABLE) != "1":
        return
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
