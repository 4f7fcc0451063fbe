"""What ``torch.compile`` means for hooks.

Compiled code does not look again at hooks (``torch._dynamo.config.skip_nnmodule_hook_guards``): those that
were there when a module was first compiled run, later ones are silently ignored, and a second instance of
the same class reuses the first one's code.  Hooks on the compiled module itself stay outside its code and
always run; so a session watches from there, and a forward in which the inner hooks stayed silent is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .plan import Plan

ALREADY_COMPILED = (
    "the model's compiled code was made without these hooks (it, or another instance of its class, ran "
    "before the session was entered): call torch._dynamo.reset() and enter the session before the first "
    "compiled call, set torch._dynamo.config.skip_nnmodule_hook_guards = False before compiling, compile "
    "layer by layer (layer.compile()) and capture at layers, or bind the model uncompiled"
)

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Compilation:
    """Where to watch a model's forwards from, given what of it is compiled.

    Attributes:
        root: the module whose forward is one call: the decoder, or the whole model where a point lies outside
            the decoder or the model is compiled.
        gate: the outermost compiled module around ``root``, or None.
        inside: ids of all modules whose hooks run inside compiled code.
        spread: whether the points lie on several devices.
    """

    root: nn.Module
    gate: nn.Module | None
    inside: frozenset[int]
    spread: bool

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> Compilation:
        """Look at ``model`` (as the user holds it) once, at binding."""
        anatomy = plan.anatomy
        inside: set[int] = set()
        gate = None
        for compiled in _compiled_modules(model):
            content = compiled._modules.get("_orig_mod") or compiled
            within = {id(m) for m in content.modules()} - {id(content), id(compiled)}
            inside |= within
            if gate is None and id(anatomy.model) in within:
                gate = compiled  # named_modules is outermost first
        decoder = {id(m) for m in anatomy.decoder.modules()}
        below = all(id(tap.place.module) in decoder - {id(anatomy.decoder)} for tap in plan.taps)
        root = anatomy.decoder if below and id(anatomy.decoder) not in inside else anatomy.model
        devices = {
            p.device for tap in plan.taps if (p := next(tap.place.module.parameters(), None)) is not None
        }
        return cls(root, gate, frozenset(inside), len(devices) > 1)

    def compiled_around(self, module: nn.Module) -> bool:
        """Whether hooks of ``module`` run inside compiled code."""
        return id(module) in self.inside

    def opaque(self, hook: _F) -> _F:
        """``hook`` as the compiler may see it: never traced, as it keeps state between forwards."""
        if not self.inside:
            return hook
        disabled: _F = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # torch's own gap
        return disabled


def _compiled_modules(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if "_orig_mod" in m._modules or m._compiled_call_impl is not None]
