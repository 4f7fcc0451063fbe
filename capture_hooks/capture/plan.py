"""A spec laid onto one model: which module to hook for each point, and its columns in the packed buffer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

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
