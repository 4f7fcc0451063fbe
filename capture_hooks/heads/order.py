"""The order of a head's inputs on disk: ascending depth, because every server sorts."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import HeadError
from ..spec import CaptureSpec, Point


def depth_order(spec: CaptureSpec, n_layers: int) -> tuple[int, ...]:
    """Indices of ``spec.inputs`` by ascending depth: input ``order[i]`` becomes input i of the file.

    SGLang and vLLM capture while the layers run and concatenate in that order, whatever the order of
    the ids they were given.  The final norm lies after every boundary; module points (``in:``,
    ``out:``), which no server captures, come last in the spec's own order.

    >>> depth_order(CaptureSpec.parse("post.6, embed, post.2"), 8)
    (1, 2, 0)
    """

    def depth(index: int) -> tuple[int, int, bool]:
        point = spec.inputs[index]
        site = point.resolve(n_layers)
        if site.boundary is not None:
            # Where a model adds something between two layers, post.k comes before pre.(k+1).
            return (0, site.boundary, point.kind == "pre")
        return (1 if site.norm else 2, 0, False)

    return tuple(sorted(range(len(spec.inputs)), key=depth))


def in_order(spec: CaptureSpec, order: Sequence[int]) -> tuple[Point, ...]:
    """The inputs as the file orders them."""
    return tuple(spec.inputs[index] for index in order)


def check_order(spec: CaptureSpec, order: Sequence[int], file_inputs: Sequence[str], where: str) -> None:
    """Check a file's permutation against the points it lists.

    Raises:
        HeadError: naming both values.
    """
    if sorted(order) != list(range(len(spec.inputs))):
        raise HeadError(
            f"{where}: capture.order {list(order)} is no permutation of the {len(spec.inputs)} inputs {spec}"
        )
    points = [str(point) for point in in_order(spec, order)]
    if points != list(file_inputs):
        raise HeadError(
            f"{where}: capture.order {list(order)} puts the inputs in the order {', '.join(points)}, "
            f"and capture.file_inputs says {', '.join(file_inputs)}"
        )
