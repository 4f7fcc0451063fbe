"""What a module computes, as tensors: not the weight that lies in it, where something stands between.

A forward hook, an adapter, a parametrization or a quantised weight all make ``module.weight`` another matrix
than the one the module multiplies with.  So a weight is taken as it lies only from a module that does nothing
else; else it is taken from `settled` or read off the module's answers, and then held against the module's
answers to random inputs.

`settled` gives a module free of what was put around its weights.  A copy is merged by PEFT's own code: equal,
to the last bit, to what ``merge_and_unload`` would leave in the module's place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import BindError


def settled(module: nn.Module) -> nn.Module:
    """The module itself where nothing is around its weights, else a plain copy of the same function.

    Active and disabled, merged and unmerged adapters count as they do in the next forward.

    Raises:
        Exception: whatever PEFT raises on an adapter that cannot be merged.
    """
    if is_adapter(module):
        # Not always a tuner's own base layer: what was merged may be wrapped again.
        return settled(_without_adapter(_copied(module)))
    return _without_parametrizations(module) if parametrize.is_parametrized(module) else module


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


def _without_parametrizations(module: nn.Module) -> nn.Module:
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


#: Rows of the identity that a projection is asked about at one time.
_ROWS: Final = 256
#: Random inputs that a matrix is tried on, and token ids that a table is.
_TRIALS: Final = 8
_TOKENS: Final = 64
#: What rounding of merged weights and of sums explains, relative to the answer's size (more in 16 bits).
_ROUNDING: Final = 1e-3


@torch.no_grad()
def projection(module: nn.Module, width: int) -> tuple[Tensor, Tensor | None]:
    """The matrix [rows, width] and the bias [rows] of a module that maps x to ``x @ matrix.T + bias``.

    Both are the module's own tensors where it is a plain linear layer.

    Raises:
        BindError: it computes anything else.
    """
    if _plain(module, nn.Linear):
        return _of(module)
    x = _random(module, (_TRIALS, width))
    for weight, bias in _matrices(module, width):
        fits = weight.shape[-1] == width and weight.is_floating_point()
        if fits and _alike(module(x), F.linear(x, weight, bias)):
            return weight, bias
    raise BindError(
        f"{type(module).__name__} computes something other than a matrix product over {width} values and a "
        "bias (is a forward hook on it, or a quantisation of its inputs?), so its weight cannot be read"
    )


@torch.no_grad()
def table(module: nn.Module) -> Tensor:
    """The rows [V, H] of a module that gives one row per token id, times a factor where its class has one.

    The module's own tensor where it is a plain embedding.

    Raises:
        BindError: it computes anything else.
    """
    if _plain(module, nn.Embedding):
        assert isinstance(module.weight, Tensor)
        return module.weight.detach()
    weight = None
    with suppress(Exception):  # whatever an adapter that cannot be merged raises
        weight = getattr(settled(module), "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 2 and weight.is_floating_point():
        ids = torch.arange(_TOKENS, device=weight.device) * (weight.shape[0] - 1) // (_TOKENS - 1)
        found, rows = module(ids), weight[ids].float()
        factor = (found.float() * rows).sum() / (rows * rows).sum()
        if _alike(found, factor * rows):
            return weight.detach()
    raise BindError(
        f"the token embedding ({type(module).__name__}) computes something other than a row per token (is a "
        "forward hook on it, or a quantised weight in it?), so its rows cannot be read"
    )


@torch.no_grad()
def gain(norm: nn.Module, width: int) -> Tensor:
    """[width] float32: what a norm multiplies normed channels with (Gemma keeps the gain less one).

    Read off its answers, so that wrappers and conventions do not matter.
    """
    # Mean 0 and mean square 1, so that both RMSNorm and LayerNorm give it times the gain, plus any bias.
    x = torch.ones(1, width)
    x[0, 1::2] = -1
    like = next(norm.parameters(), None)
    x = x if like is None else x.to(like)
    answer: Tensor = (norm(x) - norm(-x)) / 2 * x
    return answer.squeeze(0).float()


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is one of ``kind`` and does what its class says with the weight that lies in it.

    A weight without values, or sharded over processes, cannot be tried out and is taken as it lies.
    """
    weight = module._parameters.get("weight")
    if weight is None:
        return False
    if weight.is_meta or hasattr(weight, "full_tensor"):
        return True
    return (
        type(module).forward is kind.forward
        and type(weight.data) is Tensor
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not is_adapter(module)
        and not parametrize.is_parametrized(module)
    )


def _of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias as they lie in a module."""
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def _matrices(module: nn.Module, width: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What the matrix and the bias may be, likeliest first."""
    with suppress(Exception):  # whatever an adapter that cannot be merged raises
        yield _of(settled(module))
    with suppress(RuntimeError):  # it takes no rows of that width
        yield _asked(module, width)


def _asked(module: nn.Module, width: int) -> tuple[Tensor, Tensor | None]:
    """The matrix and the bias of a linear module by its answers to zero and to every unit vector."""
    zero = torch.zeros_like(_random(module, (1, width)))
    bias = module(zero)[0]
    parts = []
    for first in range(0, width, _ROWS):
        count = min(_ROWS, width - first)
        units = zero.new_zeros(count, width)
        units[torch.arange(count), first + torch.arange(count)] = 1
        parts.append((module(units) - bias).t())
    return torch.cat(parts, 1).contiguous(), bias if bool(bias.any()) else None


def _random(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers from a seed of their own, as the module takes its inputs."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(like.device, like.dtype)


def _alike(answer: Tensor, ours: Tensor) -> bool:
    """Whether two answers are equal up to rounding of weights and sums."""
    if answer.shape != ours.shape:
        return False
    allowed = max(_ROUNDING, 2 * torch.finfo(answer.dtype).eps)
    difference = float((answer.double() - ours.double()).norm())
    return difference <= allowed * float(answer.double().norm())
