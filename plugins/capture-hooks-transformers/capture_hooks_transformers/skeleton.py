"""A copy of a model without weights, on which its own ``forward`` can be followed for free.

The copy is built from the model's class and config under `FakeTensorMode`: every tensor has a shape, a
storage identity and a version counter, but no memory and no values.  The live model is never run, so
nothing changes in it, whatever its size, device placement or sharding.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode  # also what torch.export traces with
from transformers import PretrainedConfig, PreTrainedModel

from capture_hooks.errors import BindError

from .lengths import rope_types

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
        try:
            # The meta device is what from_pretrained builds on, so every class supports it; eager
            # attention is the one implementation that every class has on every device.
            with torch.device("meta"):
                build: Any = model_class._from_config  # transformers leaves it unannotated
                self.model: PreTrainedModel = build(settings, dtype=dtype, attn_implementation="eager")
        except Exception as error:  # any class's own constructor: whatever it raises becomes one clear error
            raise BindError(
                f"cannot follow how {model_class.__name__} runs its layers: building a copy without weights "
                f"from its config failed ({short(error)})"
            ) from error
        self.model.eval()
        _still(self.model)
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            _to_fake(self.model)

    def run(self) -> Any:
        """One text-only forward without a cache; the model's own output object."""
        with self.mode, torch.no_grad(), _quiet():
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            return self.model(input_ids=ids, use_cache=False, return_dict=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing the traceback of an operation that cannot run without values."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _still(model: nn.Module) -> None:
    """Let no rotary embedding look at its positions, which have no values; the wiring stays the same."""
    for module, _, layer_type in list(rope_types(model)):
        if layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type[layer_type] = "default"


def _to_fake(model: nn.Module) -> None:
    """Replace every meta tensor of ``model`` by a fake one on the CPU; shared tensors stay shared."""
    made: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []  # so that no id is used twice

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
            keep.append(tensor)
        return made[id(tensor)]

    for module in model.modules():
        for name, value in [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]:
            if not isinstance(value, torch.Tensor) or value.device.type != "meta":
                continue
            if name in module._parameters:
                module._parameters[name] = fake(value)  # type: ignore[assignment]  # fake() keeps the kind
            elif name in module._buffers:
                module._buffers[name] = fake(value)
            else:
                vars(module)[name] = fake(value)


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


def short(error: Exception) -> str:
    """Kind and first line of an error, to be quoted in another one."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
