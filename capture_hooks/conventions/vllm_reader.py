"""Which ids vLLM's two model runners find in a head's ``config.json``: they do not look in the same places.

V1 takes the top-level list, then DFlash's, and lets a nested ``eagle_config`` replace DFlash's.  V2, the
default on a GPU, never looks into ``eagle_config`` for that list, but has four keys more.  Either takes the
target's default layers where it finds nothing.  A speculators-format config is rewritten before
(`vllm_speculators`).

The expressions below are the runners' own, on purpose: what Python makes of an odd value is the answer.
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

_TOP: Final = Vllm.key
_NESTED: Final = f"eagle_config.{Vllm.key}"
_DFLASH: Final = "dflash_config.target_layer_ids"
_DSPARK: Final = "dspark_target_layer_ids"
_DENSE: Final = "target_layer_ids"
_FAILURES: Final = (TypeError, KeyError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class _Ids:
    """What a runner found: the convention's key, where it stood, and the value."""

    key: str
    at: str
    value: Any


class _Runner(Reader):
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
    def find(self, draft: Mapping[str, Any], as_is: bool) -> _Ids | None:
        """The ids in a rewritten config; ``as_is`` where DSpark's are not shifted."""

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """See `Reader.read`."""
        try:
            draft = rewritten(config, self.types, self.layers)
            method = _method(config, draft)
            if method == "dspark" and not self.dspark:
                return _refused("DSpark is implemented by the V2 runner only")
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

    def _reading(self, found: _Ids | None, family: str, n_layers: int) -> Reading:
        version = self.versions.rpartition(" ")[2]
        chosen = convention_for("vllm", family, found.key if found else _TOP, version)
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


def _of_dict(draft: Mapping[str, Any], name: str, key: str) -> Any:
    nested = draft.get(name)
    return nested.get(key) if nested and isinstance(nested, dict) else None


def _plus_one(key: str, values: Any) -> _Ids:
    """The ids under a key whose convention adds one, after the reader's own addition did not fail."""
    return _Ids(key, key, [i for i in values if (i + 1) is not None])


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refused(why: str) -> Reading:
    return Reading(None, None, None, None, why)


def _listed(found: _Ids | None) -> _Ids | None:
    """Only a list counts; anything else that is set ends the search without ids."""
    return found if found is not None and found.value and isinstance(found.value, list | tuple) else None


class VllmV1(_Runner):
    """The top-level list, then DFlash's ids plus one, which a nested ``eagle_config`` replaces, unshifted."""

    name: ClassVar[str] = "vllm.v1"
    versions: ClassVar[str] = "0.22.0 to 0.33.0"
    source: ClassVar[str] = (
        "vllm/v1/worker/gpu_model_runner.py:5190-5224 of 0.33.0 (the same statements since 0.22.0); "
        "run: 0.32.0"
    )
    rank: ClassVar[Rank] = "verified"
    dspark: ClassVar[bool] = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> _Ids | None:
        """See the class."""
        if top := draft.get(_TOP):
            return _listed(_Ids(_TOP, _TOP, top))
        found = None
        dflash, eagle = draft.get("dflash_config"), draft.get("eagle_config")
        if dflash and isinstance(dflash, dict):
            found = _plus_one(_DFLASH, dflash.get("target_layer_ids") or [])
        if eagle and isinstance(eagle, dict):
            found = _Ids(_TOP, _NESTED, eagle.get(_TOP))
        return _listed(found)


class VllmV1Until21(VllmV1):
    """The top-level list, then DFlash's ids, not shifted: one layer before the one that is meant."""

    name = "vllm.v1-0.20"
    versions = "0.20.0 to 0.21.0"
    source = "vllm/v1/worker/gpu_model_runner.py:4945 of 0.20.2"
    rank: ClassVar[Rank] = "read"
    types = ("eagle3", "dflash")
    layers = None
    sorts = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> _Ids | None:
        """See the class."""
        if top := draft.get(_TOP):
            return _listed(_Ids(_TOP, _TOP, top))
        dflash = draft.get("dflash_config")
        ids = dflash.get("target_layer_ids") if dflash and isinstance(dflash, dict) else None
        return _listed(_Ids(_TOP, _DFLASH, ids))


class VllmV1Until19(VllmV1):
    """The top-level list, and nothing else."""

    name = "vllm.v1-0.12"
    versions = "0.12.0 to 0.19.1"
    source = "vllm/v1/worker/gpu_model_runner.py:3617 of 0.12.0, the same in 0.19.1"
    rank: ClassVar[Rank] = "read"
    types = ("eagle3",)
    layers = None
    sorts = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> _Ids | None:
        """See the class."""
        return _listed(_Ids(_TOP, _TOP, draft.get(_TOP)))


class VllmV2(_Runner):
    """The top-level list; DFlash's, DSpark's and dense DSpark's ids plus one; ``layer_ids`` as they are."""

    name: ClassVar[str] = "vllm.v2"
    versions: ClassVar[str] = "0.33.0"
    source: ClassVar[str] = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:15-22,113-150 of 0.33.0"

    def find(self, draft: Mapping[str, Any], as_is: bool) -> _Ids | None:
        """See the class."""
        found = _Ids(_TOP, _TOP, draft.get(_TOP))
        if not found.value:
            found = _plus_one(_DFLASH, _of_dict(draft, "dflash_config", "target_layer_ids") or [])
        if not found.value and (ids := draft.get(_DSPARK)):
            found = _Ids(_TOP, _DSPARK, list(ids)) if as_is else _plus_one(_DSPARK, ids)
        if not found.value and (ids := draft.get(_DENSE)):
            found = _plus_one(_DENSE, ids)
        for name in ("dflash_config", "eagle_config"):
            if not found.value:
                found = _Ids(_TOP, f"{name}.layer_ids", _of_dict(draft, name, "layer_ids"))
        return _listed(found)


class VllmV2Until32(VllmV2):
    """As `VllmV2`, but ``use_aux_hidden_state`` is not looked at."""

    name = "vllm.v2-0.30"
    versions = "0.30.0 to 0.32.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:100-146 of 0.32.0; run: 0.32.0"
    rank: ClassVar[Rank] = "verified"
    flag = False


class VllmV2Until23(VllmV1Until19):
    """The top-level list, and nothing else."""

    name = "vllm.v2-0.17"
    versions = "0.17.0 to 0.23.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:35 of 0.17.0, the same in 0.23.0"
    flag = False


READERS: Final[tuple[Reader, ...]] = (
    VllmV1(),
    VllmV1Until21(),
    VllmV1Until19(),
    VllmV2(),
    VllmV2Until32(),
    VllmV2Until23(),
)
