"""Hypothesis strategies for points and capture specs.

Hypothesis finds `register` by its own entry point, so ``st.from_type(CaptureSpec)`` works in every test
of an environment where capture-hooks is installed.  Imports no torch.

Each function imports Hypothesis itself: Hypothesis calls `register` while it is being imported, which
must not find this module half-way through its own import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..spec import CaptureSpec, Point

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["points", "register", "specs"]

_SEGMENTS = ("model", "layers", "0", "3", "mlp", "self_attn", "o_proj", "h", "_x")


def points(n_layers: int | None = None, *, modules: bool = True) -> SearchStrategy[Point]:
    """Any point; with ``n_layers``, one that exists in a model of so many layers.

    Args:
        n_layers: decoder layers of the model; layers are drawn from both ends, as ``post.-1`` is one.
        modules: whether ``in:NAME`` and ``out:NAME`` are drawn too.
    """
    from hypothesis import strategies as st

    names = st.lists(st.sampled_from(_SEGMENTS), min_size=1, max_size=4).map(".".join)
    layers = st.integers(-200, 200) if n_layers is None else st.integers(-n_layers, n_layers - 1)
    kinds = [
        st.just(Point("embed")),
        st.just(Point("final_norm")),
        layers.map(Point.pre),
        layers.map(Point.post),
    ]
    if modules:
        kinds += [
            names.map(lambda name: Point("in", module=name)),
            names.map(lambda name: Point("out", module=name)),
        ]
    return st.one_of(kinds)


def specs(
    n_layers: int | None = None, *, modules: bool = True, max_inputs: int = 5
) -> SearchStrategy[CaptureSpec]:
    """Any spec; with ``n_layers``, one that resolves for a model of so many layers.

    Args:
        n_layers: decoder layers of the model.  No two inputs are then the same state of it.
        modules: whether module points are drawn too.
        max_inputs: most inputs of a spec.
    """
    from hypothesis import strategies as st

    point = points(n_layers, modules=modules)
    inputs = st.lists(
        point,
        min_size=1,
        max_size=max_inputs,
        unique_by=None if n_layers is None else lambda drawn: drawn.resolve(n_layers),
        unique=n_layers is None,
    )
    targets = st.one_of(st.just(Point("final_norm")), point)
    return st.builds(lambda drawn, target: CaptureSpec(tuple(drawn), target), inputs, targets)


def register() -> None:
    """Teach ``st.from_type`` the types of `capture_hooks.spec`; called by Hypothesis itself."""
    from hypothesis import strategies as st

    st.register_type_strategy(Point, points())
    st.register_type_strategy(CaptureSpec, specs())
