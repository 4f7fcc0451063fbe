"""A copy of a model without weights, on which its own ``forward`` can be followed for free.

The copy is built from the model's class and config under `FakeTensorMode`: every tensor has a shape, a
storage identity and a version counter, but no memory and no values.  The live model is never run, so
nothing changes in it, whatever its size, device placement or sharding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from capture_hooks.errors import BindError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # also what torch.export traces with
from transformers import PretrainedConfig, PreTrainedModel

BATCH, LENGTH = 2, 3  # unequal, so that a transposed stream is noticed


class Skeleton:
    """The weightless copy and the mode its tensors live in."""

    def __init__(
        self, model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype
    ) -> None:
        """Build it.

        Raises:
            BindError: when the class cannot be built from its config alone.
        """
        settings = copy.deepcopy(config)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with self.mode:
                self.model = model_class._from_config(
                    settings, dtype=dtype, attn_implementation="eager"
                ).eval()
        except Exception as error:  # any class's own constructor: whatever it raises becomes one clear error
            raise BindError(
                f"cannot follow how {model_class.__name__} runs its layers: building a copy without weights "
                f"from its config failed ({_short(error)})"
            ) from error

    def run(self) -> Any:
        """One text-only forward without a cache; the model's own output object."""
        with self.mode, torch.no_grad():
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            return self.model(input_ids=ids, use_cache=False, return_dict=True)


@contextlib.contextmanager
def forward_replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """Run ``forward`` in place of the module's own; hooks still fire."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def same(a: Any, b: Any) -> bool:
    """Whether two tensors are one tensor, or a view that covers all of it."""
    if a is b:
        return True
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    return a.shape == b.shape and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


short = _short
