"""Follow the residual stream through one forward of a skeleton, by tensor identity.

Names of attributes are never trusted: the layers are the list of modules that hand one tensor from each to
the next, the final norm is the norm that is fed the last one's output, and whatever else the
model does in between shows as a break in identity (or as an in-place change, by the version counter).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .skeleton import Skeleton, forward_replaced, same


@dataclass(slots=True)
class Call:
    """One call of one module: its first tensor argument, its outputs, and their versions then."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    versions_in: list[int]
    stream: Tensor | None = None  # the stream among the inputs, as a hook would find it
    output: Any = None
    version_out: int = 0

    @property
    def value(self) -> Any:
        """What the layer hands on: its output, or the first element when it returns several."""
        return self.output[0] if isinstance(self.output, (tuple, list)) and self.output else self.output

    def fed(self, value: Any, version: int) -> bool:
        """Whether ``value``, unchanged since it had ``version``, is one of the inputs."""
        return any(
            same(t, value) and v == version for t, v in zip(self.inputs, self.versions_in, strict=True)
        )


@dataclass(slots=True)
class Trace:
    """Calls in the order in which they began (layers' insides left out), and the model's output."""

    calls: list[Call] = field(default_factory=list)
    output: Any = None

    def of(self, module: nn.Module) -> list[Call]:
        return [call for call in self.calls if call.module is module]


def record(skeleton: Skeleton, lists: Sequence[tuple[str, nn.ModuleList]]) -> Trace:
    """Run the skeleton once and note every call outside the elements of ``lists``, and of those elements."""
    inside = {id(sub) for _, items in lists for item in items for sub in item.modules() if sub is not item}
    trace = Trace()
    open_calls: list[Call] = []

    def enter(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            first = args[0] if args else kwargs.get("hidden_states")
            call = Call(name, module, tensors, [t._version for t in tensors])
            call.stream = first if isinstance(first, Tensor) else None
            trace.calls.append(call)
            open_calls.append(call)

        return hook

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = open_calls.pop()
        call.output = output
        call.version_out = call.value._version if isinstance(call.value, Tensor) else 0

    with contextlib.ExitStack() as stack:
        for name, module in skeleton.model.named_modules():
            if id(module) not in inside and not isinstance(module, nn.ModuleList):
                before = module.register_forward_pre_hook(enter(name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(leave).remove)
        trace.output = skeleton.run()
    return trace


@contextlib.contextmanager
def stubbed(layers: Sequence[nn.Module], extra: int | None) -> Iterator[None]:
    """Replace what layers compute by a fresh tensor like their input, so that only the wiring runs.

    ``extra`` None returns the bare tensor, a number that many further elements of a tuple.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        value = torch.empty_like(args[0] if args else kwargs["hidden_states"])
        return value if extra is None else (value, *[None] * extra)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(forward_replaced(layer, forward))
        yield
