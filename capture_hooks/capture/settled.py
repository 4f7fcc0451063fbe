"""A module as it computes now, free of what was put around its weights: adapters and parametrizations.

An adapter of PEFT keeps the weight it was put around and adds to its output, so the weight one reads is not
what the module computes.  A copy is merged by PEFT's own code: equal, to the last bit, to what
``merge_and_unload`` would leave in the module's place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize


def settled(module: nn.Module) -> nn.Module:
    """The module itself where nothing is around its weights, else a plain copy of the same function.

    Active and disabled, merged and unmerged adapters count as they do in the next forward.

    Raises:
        Exception: whatever PEFT raises on an adapter that cannot be merged.
    """
    if is_adapter(module):
        # Not always a tuner's own base layer: what was merged may be wrapped again.
        return settled(_without_adapter(_copied(module)))
    return _plain(module) if parametrize.is_parametrized(module) else module


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's around another: a tuner's layer, or one that is trained whole."""
    return "base_layer" in module._modules or "original_module" in module._modules


def _copied(module: nn.Module) -> nn.Module:
    """A deep copy.  PEFT keeps tensors of another layer beside an adapter tied to it: of those the values."""
    held = [tensor for part in module.modules() for tensor in _tensors(vars(part))]
    return copy.deepcopy(module, {id(t): t.detach().clone() for t in held if not t.is_leaf})


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in dictionaries and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _plain(module: nn.Module) -> nn.Module:
    """A parametrized module as its class was before, with the tensors that its parametrizations give now.

    Not by ``remove_parametrizations`` on a copy: it changes the class, which the copy shares.
    """
    kind: type[nn.Module] = type(module).__bases__[0]
    plain = kind.__new__(kind)
    vars(plain).update(vars(module))
    plain._modules = {name: child for name, child in module._modules.items() if name != "parametrizations"}
    plain._parameters = dict(module._parameters)
    for name in module.parametrizations:  # type: ignore[union-attr]  # a ModuleDict
        plain._parameters[name] = nn.Parameter(getattr(module, name).detach(), requires_grad=False)
    return plain


def _without_adapter(layer: Any) -> nn.Module:
    """The plain module in place of PEFT's (peft 0.21, ``BaseTuner._unload_and_optionally_merge``)."""
    if getattr(layer, "disable_adapters", False):
        return _base(layer)
    if hasattr(layer, "unload_and_optionally_merge_module"):
        found: nn.Module = layer.unload_and_optionally_merge_module(
            merge=not getattr(layer, "merged", False), safe_merge=False, adapter_names=None
        )
        return found
    # A layer that is merged already computes with the merged adapters alone, whichever are active.
    if not layer.merged:
        layer.merge(safe_merge=False)
    return _base(layer)


def _base(layer: Any) -> nn.Module:
    """The module inside, without the adapter's share."""
    if getattr(layer, "merged", False) and getattr(layer, "disable_adapters", False):
        layer.unmerge()  # as its forward would
    if "original_module" in layer._modules:
        inside: nn.Module = layer.original_module
        return inside
    base: nn.Module = layer.base_layer
    return base
