"""``sgl_kernel.speculative``: what SGLang 0.5.23's n-gram drafting imports (``kernels/ops/speculative``)."""

from typing import Any

from .refuse import missing
from .tree import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]


def __getattr__(name: str) -> Any:
    return missing(__name__, name)
