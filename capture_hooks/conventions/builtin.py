"""The conventions that come with the core, contributed through the hook that any plugin uses."""

from __future__ import annotations

from collections.abc import Sequence

from ..hookspecs import hookimpl
from . import sglang, transformers, vllm
from .contract import Convention


@hookimpl
def capture_hooks_conventions() -> Sequence[Convention]:
    """What SGLang's, vLLM's and transformers' ids mean."""
    return [*sglang.CONVENTIONS, *vllm.CONVENTIONS, *transformers.CONVENTIONS]
