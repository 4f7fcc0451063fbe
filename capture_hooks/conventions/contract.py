"""What one library's integer layer ids mean, as a two-way and partial map to points."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ..spec import Point


class Convention(ABC):
    """Ids of one library, some of its versions and some of its model families.

    ``to_points`` and ``from_points`` are inverse wherever both are defined; where the library cannot
    express a request they raise `ConventionError` saying what it would have done instead.
    """

    #: Unique, e.g. ``"sglang.llama"``.
    name: ClassVar[str]
    #: Library the ids belong to.
    library: ClassVar[str]
    #: Versions in which the meaning was verified, e.g. ``"0.5.23"``.
    versions: ClassVar[str]
    #: Target ``model_type`` values it holds for; empty means every family not claimed by another.
    families: ClassVar[tuple[str, ...]]
    #: Where the ids stand in ``config.json``, e.g. ``"eagle_config.eagle_aux_hidden_state_layer_ids"``.
    key: ClassVar[str]
    #: File and line, or documentation, that the meaning was read from.
    source: ClassVar[str]
    #: What it cannot express, in one sentence.
    limits: ClassVar[str]

    @abstractmethod
    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states a reader of this convention captures, in the order it concatenates them.

        Raises:
            ConventionError: where the library would drop, reorder or invent a state.
        """

    @abstractmethod
    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Ids that make this library capture ``points`` in that order.

        Raises:
            ConventionError: where it cannot.
        """
