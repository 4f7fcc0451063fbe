"""The conventions that come with the core, contributed through the hook that any plugin uses."""

from __future__ import annotations

from collections.abc import Sequence

from ..hookspecs import hookimpl
from . import (
    modelopt,
    read,
    sglang,
    sglang_reader,
    specforge,
    speculators,
    transformers,
    vllm,
    vllm_dflash,
    vllm_runners,
)
from .contract import Convention, Reader


@hookimpl
def capture_hooks_conventions() -> Sequence[Convention]:
    """What each library's ids mean."""
    return [
        *sglang.CONVENTIONS,
        *vllm.CONVENTIONS,
        *vllm_dflash.CONVENTIONS,
        *speculators.CONVENTIONS,
        *specforge.CONVENTIONS,
        *modelopt.CONVENTIONS,
        *transformers.CONVENTIONS,
        *read.CONVENTIONS,
    ]


@hookimpl
def capture_hooks_readers() -> Sequence[Reader]:
    """How engines read a head's ``config.json``."""
    return [*sglang_reader.READERS, *vllm_runners.READERS, *specforge.READERS, *read.READERS]
