"""A spec laid onto one model: which module to hook for each point, and where compiled code hides hooks.

Code that ``torch.compile`` made does not look again at hooks
(``torch._dynamo.config.skip_nnmodule_hook_guards``):
those that were there when a module was first compiled run, later ones are silently ignored, and a second
instance of the same class reuses the first one's code.  Hooks on the compiled module itself stay outside its
code and always run; so a session watches from there, and a forward in which the inner hooks stayed silent is
an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import BindError
from ..spec import CaptureSpec, Point, Site
from .anatomy import Anatomy
from .layouts import Place, entering, input_of, leaving, normed, output_of
from .unwrap import WRAPPER_NAMES


@dataclass(frozen=True, slots=True)
class Tap:
    """One state to capture: its point, where it is read, and its width (None until it is first seen)."""

    point: Point
    site: Site
    place: Place
    width: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a binding captures.

    Attributes:
        anatomy: the model's parts.
        spec: the spec with non-negative layers.
        taps: the inputs in spec order, then the target where it is captured apart.
        target: index in ``taps`` of the target (one of the inputs when it is the same state), or None.
    """

    anatomy: Anatomy
    spec: CaptureSpec
    taps: tuple[Tap, ...]
    target: int | None

    @property
    def n_inputs(self) -> int:
        return len(self.spec)


def lay_out(anatomy: Anatomy, spec: CaptureSpec, *, target: bool) -> Plan:
    """Find a place for every point of ``spec``, and for its target when ``target``.

    Raises:
        SpecError: a layer out of range, or one state named twice.
        BindError: a point that this model does not have.
    """
    resolved = spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
    spec = spec.absolute(anatomy.n_layers)
    taps = [_tap(anatomy, point, site) for point, site in zip(spec.inputs, resolved.inputs, strict=True)]
    index = None
    if target:
        if resolved.target in resolved.inputs:
            index = resolved.inputs.index(resolved.target)
        else:
            index = len(taps)
            taps.append(_tap(anatomy, spec.target, resolved.target))
    return Plan(anatomy, spec, tuple(taps), index)


def every_point(anatomy: Anatomy, *, modules: bool = False) -> Iterator[Tap]:
    """Every point of a model: the stream's, and with ``modules`` the inputs and outputs of all submodules.

    Raises:
        BindError: a point that cannot be had.
    """
    n, split = anatomy.n_layers, anatomy.split_boundaries
    points = [Point("embed")]
    points += [make(k) for k in range(n) for make in (Point.pre, Point.post)]
    if anatomy.final_norm is not None:
        points.append(Point("final_norm"))
    if modules:
        names = [name for name in _canonical_modules(anatomy.model) if name]
        points += [Point(kind, module=name) for name in names for kind in ("in", "out")]
    for point in points:
        yield _tap(anatomy, point, point.resolve(n, split))


def _tap(anatomy: Anatomy, point: Point, site: Site) -> Tap:
    if site.module is not None:
        side, name = site.module
        module = _named(anatomy.model, name)
        if side == "in":
            place = Place(module, name, "before", input_of(name))
        else:
            place = Place(module, name, "after", output_of(name), plain=True)
        return Tap(point, site, place, _width(module, side))
    if site.norm:
        if anatomy.final_norm is None or anatomy.final_norm_name is None:
            fed = anatomy.readout_gap or "its lm_head is fed the end of the stream"
            raise BindError(
                f"{type(anatomy.model).__name__} has no final norm, so it has no point final_norm ({fed}); "
                f"the end of the stream is post.{anatomy.n_layers - 1}"
            )
        place = normed(anatomy.final_norm, anatomy.final_norm_name, anatomy.final_norm_call)
        return Tap(point, site, place, anatomy.hidden_size)
    k = point.absolute(anatomy.n_layers).layer
    place = leaving(anatomy, k or 0) if point.kind == "post" else entering(anatomy, k or 0)
    return Tap(point, site, place, anatomy.hidden_size)


def _width(module: nn.Module, side: str) -> int | None:
    """Width of a submodule's input or output where its class fixes it."""
    if isinstance(module, nn.Linear):
        return module.in_features if side == "in" else module.out_features
    if isinstance(module, nn.Embedding):
        return None if side == "in" else module.embedding_dim
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    return None


def _named(model: nn.Module, name: str) -> nn.Module:
    modules = _canonical_modules(model)
    if name in modules:
        return modules[name]
    near = difflib.get_close_matches(name, modules, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise BindError(
        f"{type(model).__name__} has no module {name!r}{hint} (capture-hooks points --modules lists them)"
    )


def _canonical_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Submodules by name without the wrappers' infixes; of a wrapper and its content, the wrapper.

    A real submodule that happens to be called ``module`` keeps its name.
    """
    found: dict[str, nn.Module] = {}
    _collect(model, "", found)
    return found


def _collect(module: nn.Module, name: str, found: dict[str, nn.Module]) -> None:
    found.setdefault(name, module)
    only = len(module._modules) == 1
    for part, child in module._modules.items():
        if child is None:
            continue
        inner = name if only and part in WRAPPER_NAMES else f"{name}.{part}" if name else part
        _collect(child, inner, found)


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
