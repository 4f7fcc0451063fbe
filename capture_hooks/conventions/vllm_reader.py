"""From a head's ``config.json`` to what one of vLLM's runners captures.

A config in speculators' format is rewritten first (`vllm_speculators`); then the runner looks for ids, in
places of its own (`vllm_runners`), and the target's convention says what its loop does with them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ..errors import ConventionError
from ..spec import Point
from .contract import Captured, Rank, Reader, Reading
from .lookup import convention_for
from .vllm import Vllm, VllmTransformers
from .vllm_speculators import LAYERS, TYPES, rewritten

TOP: Final = Vllm.key
_FAILURES: Final = (TypeError, KeyError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class Ids:
    """What a runner found: the convention's key, where it stood, and the value."""

    key: str
    at: str
    value: Any


class VllmRunner(Reader):
    """One of the runners, in some versions.

    The speculative method is the user's to choose; it is taken for the one that the architecture names.
    """

    library: ClassVar[str] = "vllm"
    rank: ClassVar[Rank] = "read"
    read_on: ClassVar[str] = "2026-11-30"
    #: Speculators types that it rewrites, and the ``model_type`` values of their layers; None for any.
    types: ClassVar[tuple[str, ...]] = TYPES
    layers: ClassVar[tuple[str, ...] | None] = LAYERS
    #: Whether ``eagle_config.use_aux_hidden_state`` decides what an EAGLE-3 head is fed.
    flag: ClassVar[bool] = True
    #: Whether ids are sorted before they are compared, so that a mixed list fails (since 0.30).
    sorts: ClassVar[bool] = True
    #: Whether it runs DSpark.
    dspark: ClassVar[bool] = True

    @abstractmethod
    def find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """The ids in a rewritten config; ``as_is`` where DSpark's are not shifted."""

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """See `Reader.read`."""
        try:
            draft = rewritten(config, self.types, self.layers)
            method = _method(config, draft)
            if method == "dspark" and not self.dspark:
                return _refused("this runner of this version does not run DSpark")
            if self.flag and method == "eagle3" and _fed_the_last_state(draft):
                at = "eagle_config.use_aux_hidden_state"
                return Reading(Vllm.name, at, None, Captured((Point("final_norm"),), (f"{at} is false",)))
            as_is = family == "deepseek_v41" or (
                method == "dspark" and draft.get("model_type") == "deepseek_v41"
            )
            found = self.find(draft, as_is)
        except _FAILURES as error:
            return _refused(f"it stops while it reads the head's config: {_shown(error)}")
        try:
            return self._reading(found, family, n_layers)
        except _FAILURES as error:
            return _refused(f"it stops while it sets the layers: {_shown(error)}")

    def _reading(self, found: Ids | None, family: str, n_layers: int) -> Reading:
        version = self.versions.rpartition(" ")[2]
        chosen = convention_for("vllm", family, found.key if found else TOP, version)
        if found is None:
            try:
                return Reading(chosen.name, None, None, chosen.default(n_layers))
            except ConventionError as error:
                return Reading(chosen.name, None, None, None, str(error))
        values = list(found.value)
        if isinstance(chosen, VllmTransformers):
            values = [value - 1 + 1 for value in values]  # it subtracts, whatever the value is
        elif self.sorts:
            sorted(set(values))
        ids = tuple(int(value) for value in values if _never_matches(value) is None)
        quirks = tuple(text for value in values if (text := _never_matches(value)))
        try:
            if not ids:
                raise ConventionError(
                    f"{chosen.name}: {found.at} is {values}, of which nothing names a layer"
                )
            captured = chosen.captured(ids, n_layers)
        except ConventionError as error:
            return Reading(chosen.name, found.at, ids, None, str(error))
        return Reading(chosen.name, found.at, ids, Captured(captured.points, (*quirks, *captured.quirks)))


def _method(config: Mapping[str, Any], draft: Mapping[str, Any]) -> str:
    """``eagle3``, ``dflash`` or ``dspark``."""
    architectures = draft.get("architectures")
    named = str(config.get("speculators_model_type")) + (str(architectures[0]) if architectures else "")
    return next((method for method in ("dspark", "dflash") if method in named.lower()), "eagle3")


def _fed_the_last_state(draft: Mapping[str, Any]) -> bool:
    eagle_config = draft.get("eagle_config")
    return eagle_config is not None and not eagle_config.get("use_aux_hidden_state", True)


def _never_matches(value: Any) -> str | None:
    """Why the value is the number of no layer; None where it compares equal to an integer."""
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return None
    return f"{value!r} is no number of a layer: left out"


def of_dict(draft: Mapping[str, Any], name: str, key: str) -> Any:
    nested = draft.get(name)
    return nested.get(key) if nested and isinstance(nested, dict) else None


def plus_one(key: str, values: Any) -> Ids:
    """The ids under a key whose convention adds one, after the reader's own addition did not fail."""
    return Ids(key, key, [i for i in values if (i + 1) is not None])


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refused(why: str) -> Reading:
    return Reading(None, None, None, None, why)


def listed(found: Ids | None) -> Ids | None:
    """Only a list counts; anything else that is set ends the search without ids."""
    return found if found is not None and found.value and isinstance(found.value, list | tuple) else None
