"""SGLang's EAGLE-3 ids: ``eagle_config.eagle_aux_hidden_state_layer_ids``, read by each model's own setter.

Most setters add one, so that id k is ``post.k``; two guess from the numbers.  The nested key is the only one
that is read, and a top-level list is ignored without a word.  The rules are here; which family follows which
rule in which versions is in `history`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ...errors import ConventionError
from ...spec import Point
from ..contract import Captured, Convention, Order, Rank
from .model import SglangModel

KEY = "eagle_config.eagle_aux_hidden_state_layer_ids"


class Eagle3(SglangModel):
    """Id k is ``post.k``; the embedding would be id -1."""

    key: ClassVar[str] = KEY
    #: Up to 0.5.10 the CUDA graphs of decoding are captured after a call of the setter without ids.
    graphs_take_default: ClassVar[bool] = False

    def default_boundaries(self, n_layers: int) -> list[int]:
        """EAGLE's own three layers, by their inputs; in a shallow model some coincide or do not exist."""
        return [2, n_layers // 2, n_layers - 3]

    def default(self, n_layers: int) -> Captured:
        """As `Convention.default`: EAGLE's three layers, sent through the same loop as ids."""
        found = self.default_boundaries(n_layers)
        quirk = "no ids are given: it takes its default layers"
        return self._visited([], [(f"the default {k}", k) for k in found], n_layers, [quirk])

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """See `Convention.to_points`."""
        points = super().to_points(ids, n_layers)
        if self.graphs_take_default and points != self._default_points(n_layers):
            self._refuse(ids, n_layers, self._graphs(n_layers))
        return points

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """See `Convention.from_points`."""
        ids = super().from_points(points, n_layers)
        named = tuple(self.point(k, n_layers) for k in self.boundaries(ids, n_layers))
        if self.graphs_take_default and named != self._default_points(n_layers):
            self._refuse(points, n_layers, self._graphs(n_layers))
        return ids

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """See `Convention.captured`."""
        found = super().captured(ids, n_layers)
        if self.graphs_take_default and found.points != self._default_points(n_layers):
            return Captured(found.points, (*found.quirks, self._graphs(n_layers)))
        return found

    def _default_points(self, n_layers: int) -> tuple[Point, ...]:
        by_depth = sorted(set(self.default_boundaries(n_layers)))
        return tuple(self.point(k, n_layers) for k in by_depth if 0 <= k < n_layers)

    def _graphs(self, n_layers: int) -> str:
        layers = ", ".join(map(str, self._default_points(n_layers)))
        return f"decoding under CUDA graphs captures its default, [{layers}], whatever the ids"


class FirstIdDecides(Eagle3):
    """Id k is ``post.k`` when the first id is 1, and ``pre.k`` otherwise (deepseek_v2, glm4_moe_lite)."""

    def lowest(self, n_layers: int) -> int:
        return 0 if self.embedding else 1

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return [number + 1 for number in ids] if ids and ids[0] == 1 else list(ids)

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        if boundaries[0] == 2:  # both spellings work; this one also means the same to every other family
            return [boundary - 1 for boundary in boundaries]
        if boundaries[0] == 1:
            self._refuse(
                [self.point(boundary, n_layers) for boundary in boundaries],
                n_layers,
                "post.0 comes first; the ids would start with 1, and then each is read as one layer deeper",
            )
        return list(boundaries)


class LargestIdDecides(Eagle3):
    """Id k is ``pre.k`` when the largest id is n, and ``post.k`` otherwise (gpt_oss)."""

    end = True

    def lowest(self, n_layers: int) -> int:
        return 0

    def boundaries(self, ids: Sequence[int], n_layers: int) -> list[int]:
        return list(ids) if ids and max(ids) == n_layers else [number + 1 for number in ids]

    def ids(self, boundaries: Sequence[int], n_layers: int) -> list[int]:
        if boundaries[0] > 0:  # as every other family reads them
            return [boundary - 1 for boundary in boundaries]
        if boundaries[-1] < n_layers:
            self._refuse(
                [self.point(boundary, n_layers) for boundary in boundaries],
                n_layers,
                f"the embedding is an id, 0, only in a list that ends with {n_layers}, the last output",
            )
        return list(boundaries)


class LaterDefault(Eagle3):
    """As `Eagle3`, but the default too is moved by one: one layer deeper than every other model's."""

    goes_on = True

    def default_boundaries(self, n_layers: int) -> list[int]:
        return [boundary + 1 for boundary in super().default_boundaries(n_layers)]


class WithoutResidual(Eagle3):
    """Id k is what layer k adds: the loop keeps ``hidden_states`` without the residual (gemma3).

    That is the output of the layer's last norm, so it has a name, but no point of the stream.
    """

    end = True
    #: Qualified name of the list of layers in transformers' model.
    layers: ClassVar[str]

    def point(self, boundary: int, n_layers: int) -> Point:
        if boundary == 0:
            return Point("embed")
        return Point("out", module=f"{self.layers}.{boundary - 1}.post_feedforward_layernorm")

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """The inverse for outputs of that norm; a point of the stream is refused."""
        names = {self.point(k, n_layers): Point.post(k - 1) for k in range(1, n_layers + 1)}
        for point in points:
            if point not in names:
                self._refuse(
                    points,
                    n_layers,
                    f"{point} cannot be captured: its loop leaves out the residual, and keeps only what "
                    f"each layer adds, such as {self.point(1, n_layers)}",
                )
        return super().from_points([names[point] for point in points], n_layers)


class Never(Convention):
    """Families in whose models no ids capture anything."""

    library: ClassVar[str] = "sglang"
    families: ClassVar[tuple[str, ...]] = ()
    key: ClassVar[str] = KEY
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-30"
    order: ClassVar[Order] = "depth"
    #: Why, in one sentence without its full stop.
    why: ClassVar[str]

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """Never possible."""
        self._refuse()

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Never possible."""
        self._refuse()

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """Never possible."""
        self._refuse()

    def default(self, n_layers: int) -> Captured:
        """Never possible."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConventionError(f"{self.name} ({self.library} {self.versions}): {self.why}")
