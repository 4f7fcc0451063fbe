"""transformers: the tuple ``hidden_states`` of ``output_hidden_states=True``.

Entry k is ``pre.k``; entry n is the output of the final norm, not the un-normed end of the stream,
because the last entry is replaced by ``last_hidden_state``.  Recurrent models leave the embedding out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ..spec import Point
from .boundaries import BoundaryConvention
from .contract import Captured, Order, Rank


class TransformersHiddenStates(BoundaryConvention):
    """``hidden_states[k]`` is ``pre.k`` for k < n and ``final_norm`` for k = n, in the order indexed."""

    name: ClassVar[str] = "transformers"
    library = "transformers"
    versions = "5.23 to 5.24"
    families: ClassVar[tuple[str, ...]] = ()
    key = "hidden_states"
    source = "transformers/utils/output_capturing.py: capture_outputs(tie_last_hidden_states=True)"
    limits = (
        "The un-normed output of the last layer is not among them, unless the model's config sets "
        "tie_last_hidden_states to false, which this convention does not cover."
    )
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-29"
    order: ClassVar[Order] = "listed"
    outside = "is not in the tuple: its last entry, hidden_states[n], is final_norm"

    def highest(self, n_layers: int) -> int:
        return n_layers - 1

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return list(ids)

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        return list(boundaries)

    def point(self, boundary: int, n_layers: int) -> Point:
        return Point("embed") if boundary == 0 else Point.pre(boundary)

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """As for any boundaries, but n is the final norm."""
        checked = self._checked_ids(ids, n_layers)
        rest = [number for number in checked if number != n_layers]
        found = iter(super().to_points(rest, n_layers) if rest else ())
        return tuple(Point("final_norm") if number == n_layers else next(found) for number in checked)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """As for any boundaries, but the final norm is n."""
        rest = [point for point in points if point.kind != "final_norm"]
        if len(rest) < len(points) - 1:
            self._refuse(points, n_layers, "final_norm stands there twice")
        found = iter(super().from_points(rest, n_layers) if rest or not points else ())
        return [n_layers if point.kind == "final_norm" else next(found) for point in points]

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """A tuple is indexed: what is not in it is an IndexError, and nothing happens silently."""
        return Captured(self.to_points(ids, n_layers))

    def default(self, n_layers: int) -> Captured:
        """Without ids there is the whole tuple, of which nothing is chosen."""
        self._refuse([], n_layers, "it is a tuple to choose from, and has no default")


class TransformersRecurrentHiddenStates(TransformersHiddenStates):
    """``hidden_states[k]`` is ``post.k`` for k < n, ``final_norm`` for k = n; no embedding."""

    name = "transformers.recurrent"
    versions = "5.24"
    families = ("falcon_mamba", "mamba", "mamba2", "rwkv")
    source = "transformers/models/mamba/modeling_mamba.py: entries are added after each block"
    limits = "The embedding is not among them."
    outside = "is not in the tuple: its first entry is post.0"

    def lowest(self, n_layers: int) -> int:
        return 1

    def highest(self, n_layers: int) -> int:
        return n_layers

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return [number + 1 for number in ids]

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        return [boundary - 1 for boundary in boundaries]

    def point(self, boundary: int, n_layers: int) -> Point:
        return Point.post(boundary - 1)


CONVENTIONS = (TransformersHiddenStates(), TransformersRecurrentHiddenStates())
