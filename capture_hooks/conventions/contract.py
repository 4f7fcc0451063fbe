"""What one library's integer layer ids mean, as a two-way and partial map to points; what it does silently.

Three questions, kept apart:

* what do ids *mean* to this library, exactly (`Convention.to_points`, `Convention.from_points`);
* what would it *do* with ids that it cannot mean exactly, without a word (`Convention.captured`);
* which ids does one version of one engine find in a head's whole ``config.json`` (`Reader.read`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConventionError, RefusalError
from ..spec import Point

#: The code of a `Reason`.  *type*: an id is no integer.  *count*: there are none, or not as many as it takes.
#: *negative*, *twice*, *order*, *outside*: what is wrong with an id or a point.  *unsayable*: no id names the
#: state.  *fails*: the library stops.  *never*: no ids mean anything.  *default*: there is none.
Code = Literal[
    "type", "count", "negative", "twice", "order", "outside", "unsayable", "fails", "never", "default"
]
#: *verified*: our tests run the library's own code and compare.  *read*: taken from its source.
Rank = Literal["verified", "read"]
#: *depth*: states come out by ascending depth, whatever the ids' order.  *listed*: in the ids' own order.
Order = Literal["depth", "listed"]


def why(error: ConventionError) -> str:
    """The reason of a refusal alone; the whole message where no reason stands apart."""
    return error.reason.text if isinstance(error, RefusalError) else str(error)


@dataclass(frozen=True, slots=True)
class Captured:
    """What a library captures when it is told some ids.

    Attributes:
        points: the states, in the order in which it concatenates them.
        quirks: what it did without a word and the ids do not say, a sentence each: states dropped,
            duplicates collapsed, order changed, a default taken.  Empty where the ids mean what happens.
    """

    points: tuple[Point, ...]
    quirks: tuple[str, ...] = ()


class Convention(ABC):
    """Ids of one library, some of its versions and some of its model families.

    ``to_points`` and ``from_points`` are inverse wherever both are defined; where the library cannot
    express a request they raise `ConventionError` saying what it would have done instead.
    """

    #: Unique, e.g. ``"sglang.llama"``.
    name: str
    #: Library the ids belong to.
    library: str
    #: Versions in which the meaning was established, e.g. ``"0.5.22 to 0.5.23"``; see `versions.Versions`.
    versions: str
    #: Target ``model_type`` values it holds for; empty means every family not claimed by another.
    families: tuple[str, ...]
    #: Where the ids stand in ``config.json``, e.g. ``"eagle_config.eagle_aux_hidden_state_layer_ids"``.
    key: str
    #: File and line, or documentation, that the meaning was read from.
    source: str
    #: What it cannot express, in one sentence.
    limits: str
    #: How far the meaning can be trusted, and the day (ISO) on which it was read or first verified.
    rank: Rank
    read_on: str
    #: In which order the states are concatenated.
    order: Order
    #: How many states it takes; None for any number.
    count: int | None = None
    #: Whether ids of this library are these where no key is named: its EAGLE-3 list, one key per library.
    primary: bool = True
    #: Name of a convention of the same library and key that this one replaces wherever one is looked up.
    overrides: str | None = None

    @abstractmethod
    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """The states a reader of this convention captures, in the order it concatenates them.

        Raises:
            ConventionError: where the library would fail, or drop, reorder or invent a state.
        """

    @abstractmethod
    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """Ids that make this library capture ``points`` in that order.

        Raises:
            ConventionError: where it cannot.
        """

    @abstractmethod
    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """What the library does with ``ids``, meant or not: `to_points` exactly where there are no quirks.

        Raises:
            ConventionError: where the library itself fails; with how.
        """

    @abstractmethod
    def default(self, n_layers: int) -> Captured:
        """What the library captures when the list is missing.

        Raises:
            ConventionError: where it refuses, or takes the layers from elsewhere.
        """


#: Conventions by name, those that another one replaces included.
Conventions = Mapping[str, Convention]


@dataclass(frozen=True, slots=True)
class TakenIds:
    """What an engine takes from a head's ``config.json``.

    Attributes:
        convention: name of the convention by which it reads the ids; None where it was refused before.
        key: where it found them; None where it found none and takes its default layers.
        ids: what stands there, as the engine takes it.
        captured: the states it will capture; None where it fails.
        refusal: how it fails, without the convention's name; None where it does not.
    """

    convention: str | None
    key: str | None
    ids: tuple[int, ...] | None
    captured: Captured | None
    refusal: str | None = None


class Reader(ABC):
    """How one engine, in some versions, gets from a draft head's ``config.json`` to captured states.

    It knows the engine's order of keys, its fall-backs and its own conventions.
    """

    #: Unique, e.g. ``"vllm.v1"``.
    name: str
    library: str
    versions: str
    source: str
    rank: Rank
    read_on: str
    #: How it gets to the ids, in a sentence, for a table of readers.
    about: str = ""

    @abstractmethod
    def read(self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions) -> TakenIds:
        """Total: every config gives states, or a refusal.

        Args:
            config: the head's whole ``config.json``.
            family: the target's ``model_type``.
            n_layers: the target's decoder layers.
            known: the conventions of which one says what the ids mean.
        """
