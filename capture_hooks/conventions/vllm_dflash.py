"""vLLM's ids under the keys of DFlash and DSpark drafts: its readers add one, so id k is ``post.k``.

``dflash_config.target_layer_ids`` (both runners), ``dspark_target_layer_ids`` and the top-level
``target_layer_ids`` (the V2 runner).  What a target's loop then does is as for EAGLE-3's list.
The one list that is not shifted, ``dspark_target_layer_ids`` of a ``deepseek_v41`` draft, belongs to a target
of several streams, where no point is named either way.
"""

from __future__ import annotations

from typing import Any, Final, cast

from .contract import Convention
from .vllm import Vllm, VllmDeepseek, VllmDeepseekV32, VllmManyStreams, VllmTransformers, VllmWithout

_LOOPS: Final = (Vllm, VllmDeepseek, VllmDeepseekV32, VllmTransformers, VllmManyStreams, VllmWithout)
_READERS: Final = (
    "vllm/v1/worker/gpu_model_runner.py:5203-5215 and "
    "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:113-141 of 0.33.0; run: 0.32.0"
)
_NO_DEFAULT: Final = "A list that is missing or empty is one that the reader looks for elsewhere."


def _under(name: str, key: str, since: str, loop: type[Convention]) -> Convention:
    """The convention of one key for the targets of one loop."""
    loop_since, _, until = loop.versions.partition(" to ")
    kind = loop.name.removeprefix("vllm").removeprefix(".")
    attributes: dict[str, Any] = {
        "__doc__": f"Id k is ``post.k``, for targets of `{loop.__name__}`.",
        "name": f"{name}.{kind}" if kind else name,
        "key": key,
        "primary": False,
        "shift": 1,
        "source": f"{_READERS}; {loop.source}",
        "limits": f"The embedding cannot be captured: it would be id -1. {_NO_DEFAULT} {loop.limits}",
        "versions": f"{max(since, loop_since)} to {until}",
    }
    return cast(Convention, type(f"{loop.__name__}Plus1", (loop,), attributes)())


CONVENTIONS: tuple[Convention, ...] = tuple(
    _under(name, key, since, loop)
    for name, key, since in (
        ("vllm.dflash", "dflash_config.target_layer_ids", "0.24.0"),
        ("vllm.dspark", "dspark_target_layer_ids", "0.25.1"),
        ("vllm.dspark_dense", "target_layer_ids", "0.25.1"),
    )
    for loop in _LOOPS
)
