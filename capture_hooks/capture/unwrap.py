"""From whatever the user holds to the language model inside, and to its anatomy.

Wrappers are known by what they are, not by which library made them:

* one child under a wrapper's reserved name: ``torch.compile`` (``_orig_mod``), DDP and DataParallel
  (``module``), FSDP1 (``_fsdp_wrapped_module``), activation checkpointing (``_checkpoint_wrapped_module``);
* what an installed anatomy provider says it wraps (`AnatomyProvider.unwrap`);
* ``get_base_model()``: PEFT's own door to the model it adapts;
* an unknown module with a single child that no provider claims.

FSDP2 (``fully_shard``) and accelerate's ``device_map`` rename nothing, so there is nothing to peel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from ..errors import BindError
from ..plugins import registry

if TYPE_CHECKING:
    from .anatomy import Anatomy, AnatomyProvider

#: Names under which a wrapper keeps the one module it wraps.
WRAPPER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module")


def find_anatomy(model: nn.Module, providers: Mapping[str, AnatomyProvider] | None = None) -> Anatomy:
    """The parts of the language model inside ``model``, wrappers peeled.

    Args:
        model: any module that holds one decoder-only language model.
        providers: anatomy providers by name; None for those of the installed plugins.

    Raises:
        BindError: when no provider knows the model, two know it equally well, or it holds several models.
    """
    if providers is None:
        providers = registry().anatomies
    for candidate in peel(model, providers):
        scores = {name: provider.match(candidate) for name, provider in providers.items()}
        best = max(scores.values(), default=0)
        if best <= 0:
            continue
        winners = [name for name, score in scores.items() if score == best]
        if len(winners) > 1:
            raise BindError(
                f"anatomy providers {' and '.join(map(repr, winners))} claim {_name(candidate)} equally well "
                f"(score {best}); leave one out with CAPTURE_HOOKS_DISABLE_PLUGINS, or pass anatomy= to bind"
            )
        return providers[winners[0]].describe(candidate)
    known = ", ".join(providers) or "none"
    raise BindError(
        f"no installed anatomy provider knows {_name(model)} (installed: {known}); install the plugin of the "
        "library it comes from (capture-hooks-transformers for Hugging Face models), "
        "or pass bind(..., anatomy=Anatomy(...))"
    )


def peel(model: nn.Module, providers: Mapping[str, AnatomyProvider]) -> Iterator[nn.Module]:
    """The modules that may be the language model, outermost first; known wrappers are left out.

    Raises:
        BindError: when a provider's wrapper holds several models.
    """
    seen: set[int] = set()
    current: nn.Module | None = model
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        inner = _inside(current, providers)
        if inner is None:
            yield current
            children = list(current.children())
            inner = children[0] if len(children) == 1 else None
        current = inner


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """The one module inside a wrapper known by its child's reserved name; None for any other module."""
    children = module._modules
    if len(children) != 1:
        return None
    ((name, child),) = children.items()
    return child if name in WRAPPER_NAMES else None


def _inside(module: nn.Module, providers: Mapping[str, AnatomyProvider]) -> nn.Module | None:
    if (inner := wrapped_by(module)) is not None:
        return inner
    for name, provider in providers.items():
        inside = provider.unwrap(module)
        if len(inside) > 1:
            held = ", ".join(_name(one) for one in inside)
            raise BindError(
                f"{_name(module)} holds several models according to {name!r} ({held}); bind the one you mean"
            )
        if inside:
            return inside[0]
    base = getattr(module, "get_base_model", None)
    if callable(base) and isinstance(inner := base(), nn.Module) and inner is not module:
        return inner
    return None


def _name(module: nn.Module) -> str:
    return type(module).__name__
