"""transformers: the tuple ``hidden_states``, what selects from it, and DFlash ids.

Entry k is ``pre.k``; entry n is the output of the final norm, not the un-normed end of the stream, because
the last entry is replaced by ``last_hidden_state``, unless ``config.tie_last_hidden_states`` is false.
Recurrent models leave the embedding out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NoReturn

from ..errors import ConventionError, SpecError
from ..spec import Point
from .contract import Captured, Convention, Order, Rank


class TransformersHiddenStates(Convention):
    """``hidden_states[k]`` is ``pre.k`` for k < n and ``final_norm`` for k = n, in the order indexed."""

    name: ClassVar[str] = "transformers"
    library = "transformers"
    versions = "5.23 to 5.24"
    families: ClassVar[tuple[str, ...]] = ()
    key: ClassVar[str] = "hidden_states"
    source = "transformers/utils/output_capturing.py:310-380 (capture_outputs)"
    limits: ClassVar[str] = (
        "The un-normed output of the last layer is not among them, unless the model's config sets "
        "tie_last_hidden_states to false, which this convention does not cover."
    )
    rank: ClassVar[Rank] = "verified"
    read_on: ClassVar[str] = "2026-11-30"
    order: ClassVar[Order] = "listed"
    #: Entries before the one that id 0 names.
    first: ClassVar[int] = 0

    def entry(self, index: int, n_layers: int) -> Point:
        """What stands at ``index``, from 0 to n."""
        if index == n_layers:
            return Point("final_norm")
        return Point.pre(index) if index else Point("embed")

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """See `Convention.to_points`."""
        captured = self.captured(ids, n_layers)
        if captured.quirks:
            self._refuse(ids, n_layers, captured.quirks[0])
        return captured.points

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """See `Convention.from_points`."""
        entries = {self.entry(k, n_layers).resolve(n_layers): k for k in range(self.first, n_layers + 1)}
        ids = list[int]()
        for point in points:
            try:
                site = point.resolve(n_layers)
            except SpecError as error:
                raise ConventionError(f"{self.name}: {error}") from None
            if site not in entries:
                where = "" if site.boundary is None else f"boundary {site.boundary}, which is "
                self._refuse(
                    points, n_layers, f"{point} is {where}not in the tuple (or no id names it): {self.limits}"
                )
            ids.append(entries[site] - self.first)
        if not points:
            self._refuse(points, n_layers, "there are no points")
        if len(set(ids)) < len(ids):
            self._refuse(points, n_layers, "one state stands there twice")
        if self.order == "depth" and ids != sorted(ids):
            self._refuse(points, n_layers, "the states come by depth, and these points do not")
        return ids

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """A tuple is indexed: a negative index counts from its end, and one beyond it is an IndexError."""
        points, quirks = list[Point](), list[str]()
        for number in self._integers(ids, n_layers):
            index = number + self.first
            if not -n_layers - 1 <= index <= n_layers:
                self._refuse(ids, n_layers, f"hidden_states[{index}] is not in the tuple, an IndexError")
            point = self.entry(index % (n_layers + 1), n_layers)
            if number < 0:
                quirks.append(f"{number} is negative, and is {point} by counting from an end of the tuple")
            if point in points:
                quirks.append(f"{point} is there more than once")
            points.append(point)
        return Captured(tuple(points), tuple(quirks))

    def default(self, n_layers: int) -> Captured:
        """Without ids there is the whole tuple, of which nothing is chosen."""
        self._refuse([], n_layers, "it is a tuple to choose from, and has no default")

    def _integers(self, ids: Sequence[int], n_layers: int) -> list[int]:
        for number in ids:
            if type(number) is not int:
                self._refuse(ids, n_layers, f"{number!r} is not an integer")
        if not ids:
            self._refuse(ids, n_layers, "there are no ids")
        return list(ids)

    def _refuse(self, request: Sequence[object], n_layers: int, why: str) -> NoReturn:
        shown = f"[{', '.join(str(item) for item in request)}]"
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}, {self.key}): cannot take {shown} "
            f"for a model of {n_layers} layers: {why}"
        )


class TransformersRecurrentHiddenStates(TransformersHiddenStates):
    """``hidden_states[k]`` is ``post.k`` for k < n, ``final_norm`` for k = n; no embedding."""

    name = "transformers.recurrent"
    versions = "5.24"
    families = ("falcon_mamba", "mamba", "mamba2", "rwkv")
    source = "transformers/models/mamba/modeling_mamba.py: entries are added after each block"
    limits = "The embedding is not among them."

    def entry(self, index: int, n_layers: int) -> Point:
        return Point("final_norm") if index == n_layers else Point.post(index)


class TransformersUntied(TransformersHiddenStates):
    """``hidden_states[k]`` is ``pre.k`` for every k: entry n is the un-normed end of the stream."""

    name = "transformers.untied"
    primary: ClassVar[bool] = False
    versions = "5.24"
    key = "hidden_states of tie_last_hidden_states=False"
    limits = (
        "The output of the final norm is not among them; models without capture_outputs ignore the setting."
    )

    def entry(self, index: int, n_layers: int) -> Point:
        return Point.post(n_layers - 1) if index == n_layers else super().entry(index, n_layers)


class TransformersSelected(TransformersHiddenStates):
    """``output_hidden_states=[...]`` keeps these entries of the tuple, by depth; the others are None."""

    name = "transformers.selected"
    primary: ClassVar[bool] = False
    versions = "5.24"
    key = "output_hidden_states"
    source = "transformers/utils/output_capturing.py:247-279 (resolve_hidden_states_indices)"
    limits = "The un-normed end of the stream is not among them; a bare 0 is false, and selects nothing."
    order: ClassVar[Order] = "depth"

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What is out of range selects nothing; what is selected twice is there once."""
        entries, quirks = list[int](), list[str]()
        for number in self._integers(ids, n_layers):
            index = number % (n_layers + 1)
            if not -n_layers - 1 <= number <= n_layers:
                quirks.append(f"{number} is not in the tuple, and selects nothing")
                continue
            if number < 0:
                quirks.append(f"{number} is negative, and selects {self.entry(index, n_layers)}")
            if index in entries:
                quirks.append(f"{self.entry(index, n_layers)} is selected twice, and there once")
            else:
                entries.append(index)
        if entries != sorted(entries):
            quirks.append("they come by depth, not in the order of the ids")
        return Captured(tuple(self.entry(index, n_layers) for index in sorted(entries)), tuple(quirks))


class TransformersDflash(TransformersHiddenStates):
    """Id k is ``hidden_states[k + 1]``: ``post.k``, and ``final_norm`` for the last layer."""

    name = "transformers.dflash"
    primary: ClassVar[bool] = False
    versions = "5.24"
    key = "target_layer_ids"
    source = (
        "transformers/generation/candidate_generator.py:1535-1537,1597-1602 (DFlashTokenCandidateGenerator)"
    )
    limits = "Neither the embedding nor the un-normed output of the last layer can be told."
    first = 1

    def entry(self, index: int, n_layers: int) -> Point:
        point = super().entry(index, n_layers)
        return point if index in (0, n_layers) else Point.post(index - 1)


CONVENTIONS = (
    TransformersHiddenStates(),
    TransformersRecurrentHiddenStates(),
    TransformersUntied(),
    TransformersSelected(),
    TransformersDflash(),
)
