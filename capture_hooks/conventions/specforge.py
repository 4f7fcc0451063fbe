"""SpecForge 0.2: three ids for an EAGLE-3 head, any number for DFlash, handed to SGLang's own setters.

It takes a run's own list, else the draft config's nested one, else EAGLE's three layers, checks that they are
distinct and not negative, and calls the setter of the target's model in SGLang 0.5.14.  What that makes of
them, guesses by family included, is SGLang's convention of the family; each has its counterpart here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn, cast

from ..errors import ConventionError
from ..spec import Point
from . import sglang
from .contract import Captured, Convention, Rank, Reader, Reading
from .versions import Versions

_SGLANG: Final = "0.5.14"
_EAGLE3: Final = "eagle_config.eagle_aux_hidden_state_layer_ids"
_DFLASH: Final = "dflash_config.target_layer_ids"


class Specforge(Convention):
    """What one of SGLang's conventions says, for the lists that SpecForge lets through."""

    library = "specforge"
    versions: ClassVar[str] = "0.2.0"
    read_on: ClassVar[str] = "2026-11-30"
    count: ClassVar[int | None] = 3
    #: SGLang's convention.
    through: ClassVar[Convention]

    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        """See `Convention.to_points`."""
        return self.through.to_points(self._let_through(ids, n_layers), n_layers)

    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        """See `Convention.from_points`."""
        return self._let_through(self.through.from_points(points, n_layers), n_layers)

    def captured(self, ids: Sequence[int], n_layers: int) -> Captured:
        """See `Convention.captured`."""
        return self.through.captured(self._let_through(ids, n_layers), n_layers)

    def default(self, n_layers: int) -> Captured:
        """1, n//2-1 and n-4, sent through SGLang like any other list."""
        ids = [1, n_layers // 2 - 1, n_layers - 4]
        found = self.captured(ids, n_layers)
        return Captured(found.points, (f"no ids are given: it takes {ids}", *found.quirks))

    def _let_through(self, ids: Sequence[int], n_layers: int) -> list[int]:
        if self.count is not None and len(ids) != self.count:
            self._refuse(ids, n_layers, f"it takes exactly {self.count}")
        if not ids:
            self._refuse(ids, n_layers, "there are no ids")
        for number in ids:
            if type(number) is not int or number < 0:
                self._refuse(ids, n_layers, f"{number!r} is no integer from 0")
        if len(set(ids)) < len(ids):
            self._refuse(ids, n_layers, "they must be distinct")
        return list(ids)

    def _refuse(self, request: Sequence[object], n_layers: int, why: str) -> NoReturn:
        shown = f"[{', '.join(str(item) for item in request)}]"
        raise ConventionError(
            f"{self.name} ({self.library} {self.versions}, {self.key}): cannot take {shown} "
            f"for a model of {n_layers} layers: {why}"
        )


class SpecforgeDflash(Specforge):
    """The list of a DFlash, DSpark or Domino draft, of any length."""

    count = None

    def default(self, n_layers: int) -> Captured:
        """None: a draft config without the list is refused."""
        self._refuse((), n_layers, "the draft config must define target capture layer ids")


def _through(rule: type[Specforge], inner: Convention) -> Convention:
    kind = inner.name.removeprefix("sglang.").partition("-")[0]
    attributes: dict[str, Any] = {
        "__doc__": rule.__doc__,
        "through": inner,
        "name": f"specforge.{kind}",
        "key": inner.key,
        "families": inner.families,
        "primary": inner.primary,
        "rank": inner.rank,
        "order": inner.order,
        "limits": f"It takes {rule.count or 'distinct'} ids. {inner.limits}",
        "source": (
            "specforge/algorithms/model_providers.py:188-242, training/capture_contract.py:44-58 and "
            "offline_capture/sglang_backend/capture.py:86-110 of 0.2.0, "
            f"then SGLang {_SGLANG}: {inner.source}"
        ),
    }
    return cast(Convention, type(rule.__name__, (rule,), attributes)())


class SpecforgeReader(Reader):
    """How a training run takes a draft's config, where the run names no layers of its own."""

    name = "specforge"
    library = "specforge"
    versions = Specforge.versions
    source = "specforge/algorithms/model_providers.py:188-242 and training/capture_contract.py:44-58 of 0.2.0"
    rank: ClassVar[Rank] = "verified"
    read_on = Specforge.read_on

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """See `Reader.read`."""
        architectures = config.get("architectures")
        named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        block = any(kind in named for kind in ("DFlash", "DSpark", "Domino"))
        key = _DFLASH if block else _EAGLE3
        chosen = _for(key, family)
        if chosen is None:
            return Reading(None, None, None, None, f"it has no {key} for targets of the family {family!r}")
        outer, _, inner = key.partition(".")
        nested = config.get(outer) or {}
        if not isinstance(nested, dict):
            return Reading(chosen.name, key, None, None, f"{outer} is {nested!r}, no object")
        ids = nested.get(inner)
        if ids is None and not block:
            return _reading(chosen, None, None, n_layers)
        return _reading(chosen, key, ids, n_layers)


def _for(key: str, family: str) -> Convention | None:
    mine = [c for c in CONVENTIONS if c.key == key]
    named = [c for c in mine if family in c.families] or [c for c in mine if not c.families]
    return named[0] if named else None


def _reading(chosen: Convention, key: str | None, ids: Any, n_layers: int) -> Reading:
    if key is not None and not isinstance(ids, list):
        return Reading(chosen.name, key, None, None, f"{key} is {ids!r}, no list of layers")
    written = None if key is None else tuple(ids)
    try:
        found = chosen.default(n_layers) if written is None else chosen.captured(written, n_layers)
    except ConventionError as error:
        return Reading(chosen.name, key, written, None, str(error))
    return Reading(chosen.name, key, written, found)


_RULES: Final = {_EAGLE3: Specforge, _DFLASH: SpecforgeDflash}
CONVENTIONS: tuple[Convention, ...] = tuple(
    _through(_RULES[inner.key], inner)
    for inner in sglang.CONVENTIONS
    if inner.key in _RULES and _SGLANG in Versions.parse(inner.versions)
)
READERS: tuple[Reader, ...] = (SpecforgeReader(),)
