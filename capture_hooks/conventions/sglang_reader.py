"""Which ids SGLang finds in a head's ``config.json``: those in ``eagle_config``, or none.

A DFlash or DSpark draft has keys of its own (`sglang.dflash_reader`).  For any other it looks in one place,
inside a bare ``except``: whatever goes wrong there gives the default layers of the target's model, without
a word.  What is then done with the ids differs by family and version, so there is
one reader for each run of versions in which the same conventions speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, ClassVar, Final

from ..errors import ConventionError
from ..spec import Point
from .contract import Captured, Rank, Reader, Reading
from .lookup import convention_for
from .sglang import CONVENTIONS
from .sglang.dflash_reader import is_draft, read_draft
from .versions import Versions

_KEY: Final = "eagle_config.eagle_aux_hidden_state_layer_ids"
_FLAG: Final = "eagle_config.use_aux_hidden_state"
#: The last part of the versions that were looked at, 0.5.9 to 0.5.23.
_RELEASES: Final = range(9, 24)
#: What its setters and our conventions raise over values that are no list of integers.
_FAILURES: Final = (TypeError, KeyError, ValueError, IndexError, AttributeError)


class SglangServer(Reader):
    """SGLang in some versions."""

    library: ClassVar[str] = "sglang"
    read_on: ClassVar[str] = "2026-11-30"
    source: ClassVar[str] = (
        "srt/model_executor/model_runner_components/spec_aux_hidden_state.py:187-196 of 0.5.23; run: 0.5.23"
    )

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """See `Reader.read`."""
        version = self.versions.rpartition(" ")[2]
        if is_draft(config):
            return read_draft(config, family, n_layers, version)
        if "speculators_model_type" in config:
            return _refused("it has no parser for speculators' layout")
        eaten, ids = _found(config)
        if not eaten:
            final = Captured((Point("final_norm"),), (f"{_FLAG} is false",))
            return Reading(None, _FLAG, None, final)
        try:
            chosen = convention_for(self.library, family, None, version)
            if ids is None:
                found = chosen.default(n_layers)
                own = ", ".join(map(str, found.points))
                quirk = f"no ids are found under {_KEY}: it takes its default, {own}"
                return Reading(chosen.name, None, None, Captured(found.points, (quirk, *found.quirks)))
            listed = tuple(ids)
        except ConventionError as error:
            return _refused(str(error))
        except _FAILURES as error:
            return _refused(f"it stops while it sets the layers: {type(error).__name__}: {error}")
        try:
            return Reading(chosen.name, _KEY, listed, chosen.captured(listed, n_layers))
        except _FAILURES as error:
            return Reading(chosen.name, _KEY, listed, None, str(error) or type(error).__name__)


def _found(config: Mapping[str, Any]) -> tuple[bool, Any]:
    """Whether the head eats intermediate states, and its ids; SGLang's own statements."""
    eaten = True
    try:
        eagle_config: Any = config.get("eagle_config")
        eaten = eagle_config.get("use_aux_hidden_state", True)
        return bool(eaten), eagle_config["eagle_aux_hidden_state_layer_ids"]
    except Exception:  # as SGLang does
        return bool(eaten), None


def _refused(why: str) -> Reading:
    return Reading(None, None, None, None, why)


def _readers() -> tuple[Reader, ...]:
    """One for each run of versions in which the same conventions speak, the newest named ``sglang``."""

    def speaking(release: int) -> frozenset[str]:
        return frozenset(
            convention.name
            for convention in CONVENTIONS
            if f"0.5.{release}" in Versions.parse(convention.versions)
        )

    made: list[Reader] = []
    for _, group in groupby(_RELEASES, speaking):
        run = list(group)
        versions = f"0.5.{run[0]}" + (f" to 0.5.{run[-1]}" if len(run) > 1 else "")
        name = "sglang" if run[-1] == _RELEASES[-1] else f"sglang-0.5.{run[-1]}"
        rank: Rank = "verified" if name == "sglang" else "read"
        about = {"name": name, "versions": versions, "rank": rank}
        made.append(type("SglangServer", (SglangServer,), about)())
    return tuple(made)


READERS: Final = _readers()
