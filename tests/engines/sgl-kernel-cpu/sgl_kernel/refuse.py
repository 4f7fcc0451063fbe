"""What this distribution refuses: to stand in front of real kernels, and to run what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any, NoReturn

import torch

#: This distribution's name.
NAME = "capture-hooks-sgl-kernel-cpu"

#: Distributions that carry SGLang's real kernels, by their names over time.
REAL = ("sgl-kernel", "sglang-kernel", "sgl-kernel-cpu", "sglang-kernel-cpu")


def where_real_kernels_exist() -> None:
    """Check that nothing better than plain torch on a CPU is here.

    Raises:
        ImportError: where one of `REAL` is installed, ``torch.ops.sgl_kernel`` already holds an attention
            operator, or a CUDA device is available.
    """
    found = _installed() or _registered() or _gpu()
    if found:
        raise ImportError(
            f"{NAME} stands in for SGLang's kernels on CPUs that have none, for tests only, and refuses to "
            f"load because {found}; uninstall {NAME} here"
        )


def _installed() -> str | None:
    for name in REAL:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return f"the real kernel library is installed ({name} {version})"
    return None


def _registered() -> str | None:
    if hasattr(torch.ops.sgl_kernel, "decode_attention_cpu"):
        return "torch.ops.sgl_kernel.decode_attention_cpu is already registered by another library"
    return None


def _gpu() -> str | None:
    return "a CUDA device is available" if torch.cuda.is_available() else None


def missing(module: str, name: str) -> Callable[..., NoReturn]:
    """Stand in for an operator this distribution lacks: a callable that refuses, naming it.

    Raises:
        AttributeError: for dunder names, which Python itself probes.
    """
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{module}.{name} is not among the operators that {NAME} provides; "
            "this model or option needs SGLang's real kernels"
        )

    refuse.__name__ = refuse.__qualname__ = name
    return refuse
