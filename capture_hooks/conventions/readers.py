"""From a draft head's ``config.json`` to the states that an engine captures: keys, fall-backs, and the rest.

Which list a library finds is said here; what it means is said by the convention for the
target's family, that key and that version.  Statements that can fail on odd values are the library's own:
what Python makes of such a value is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, Literal

from ..errors import ConventionError
from ..spec import Point
from .contract import Captured, Convention, Conventions, Rank, Reader, TakenIds, why
from .lookup import BUILTIN, convention_for, rows, spelled_out, table
from .rules import SglangBlocks, VllmBackend, spread
from .versions import Versions

#: Where EAGLE-3 heads keep their ids: SGLang, SpecForge and ModelOpt; vLLM, speculators and llama.cpp.
NESTED: Final = "eagle_config.eagle_aux_hidden_state_layer_ids"
TOP: Final = "eagle_aux_hidden_state_layer_ids"
#: Where heads that draft whole blocks keep theirs.
DFLASH: Final = "dflash_config.target_layer_ids"
DSPARK: Final = "dspark_target_layer_ids"
DENSE: Final = "target_layer_ids"
_FLAG: Final = "eagle_config.use_aux_hidden_state"
#: What libraries raise over values that are no list of integers.
_FAILURES: Final = (TypeError, KeyError, ValueError, IndexError, AttributeError)


@dataclass(frozen=True, kw_only=True)
class ReaderRow(Reader):
    """The fields of a row that every reader has; see `Reader`."""

    name: str
    library: str
    versions: str
    source: str
    rank: Rank
    read_on: str
    about: str = ""

    @property
    def version(self) -> str:
        """The last of its versions."""
        return self.versions.rpartition(" ")[2]

    def convention(self, known: Conventions, family: str, key: str | None = None) -> Convention:
        """The convention by which this version reads ids for targets of a family."""
        return convention_for(self.library, family, key, self.version, known)


def refused(reason: str) -> TakenIds:
    """The engine stops before it looks at ids."""
    return TakenIds(None, None, None, None, reason)


def read_list(chosen: Convention, key: str | None, ids: Any, n_layers: int) -> TakenIds:
    """What a convention makes of a value; of None, its default."""
    if ids is not None and not isinstance(ids, list | tuple):
        return TakenIds(chosen.name, key, None, None, f"{key} is {ids!r}, no list")
    written = None if ids is None else tuple(ids)
    try:
        found = chosen.default(n_layers) if written is None else chosen.captured(written, n_layers)
    except ConventionError as error:
        return TakenIds(chosen.name, key, written, None, why(error))
    return TakenIds(chosen.name, key, written, found)


# SGLang


@dataclass(frozen=True, kw_only=True)
class Sglang(ReaderRow):
    """EAGLE-3's nested list, or none: whatever goes wrong there ends in the default layers, without a word.

    A DFlash or DSpark draft, told by its architecture, has keys of its own; see `read_blocks`.
    """

    def read(
        self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions = BUILTIN
    ) -> TakenIds:
        """What the engine takes from a config; see `Reader.read`."""
        if _architectures(config) & (_DFLASH_DRAFTS | _DSPARK_DRAFTS):
            return read_blocks(config, family, n_layers, self.version, known)
        if "speculators_model_type" in config:
            return refused("it has no parser for speculators' layout")
        intermediate, ids = self._found(config)
        if not intermediate:
            return TakenIds(None, _FLAG, None, Captured((Point("final_norm"),), (f"{_FLAG} is false",)))
        try:
            chosen = self.convention(known, family)
            if ids is None:
                found = chosen.default(n_layers)
                own = ", ".join(map(str, found.points))
                quirk = f"no ids are found under {NESTED}: it takes its default, {own}"
                return TakenIds(chosen.name, None, None, Captured(found.points, (quirk, *found.quirks)))
            listed = tuple(ids)
        except ConventionError as error:
            return refused(why(error))
        except _FAILURES as error:
            return refused(f"it stops while it sets the layers: {_shown(error)}")
        try:
            return TakenIds(chosen.name, NESTED, listed, chosen.captured(listed, n_layers))
        except ConventionError as error:
            return TakenIds(chosen.name, NESTED, listed, None, why(error))
        except _FAILURES as error:
            return TakenIds(chosen.name, NESTED, listed, None, str(error) or type(error).__name__)

    def _found(self, config: Mapping[str, Any]) -> tuple[bool, Any]:
        """Whether the head takes intermediate states, and its ids."""
        intermediate = True
        try:
            eagle_config: Any = config.get("eagle_config")
            intermediate = eagle_config.get("use_aux_hidden_state", True)
            return bool(intermediate), eagle_config["eagle_aux_hidden_state_layer_ids"]
        except Exception:  # as SGLang does
            return bool(intermediate), None

    def in_runs(self, conventions: Sequence[Convention]) -> list[Reader]:
        """One for each run of releases in which the same conventions speak, the newest under this name."""
        mine = [convention for convention in conventions if convention.library == self.library]

        def speaking(release: str) -> frozenset[str]:
            return frozenset(c.name for c in mine if release in Versions.parse(c.versions))

        minor, first, last = _patch_releases(self.versions)
        made: list[Reader] = []
        for _, group in groupby((f"{minor}.{patch}" for patch in range(first, last + 1)), speaking):
            run = list(group)
            if run[-1] == self.version:
                made.append(replace(self, versions=" to ".join(dict.fromkeys((run[0], run[-1])))))
                continue
            versions = " to ".join(dict.fromkeys((run[0], run[-1])))
            made.append(replace(self, name=f"{self.name}-{run[-1]}", versions=versions, rank="read"))
        return made


def _patch_releases(versions: str) -> tuple[str, int, int]:
    """``0.5.9 to 0.5.23`` as ``0.5``, 9 and 23."""
    first, _, last = versions.partition(" to ")
    minor, _, patch = first.rpartition(".")
    return minor, int(patch), int(last.rpartition(".")[2])


#: ``EntryClass`` of models/dflash.py, and of the models of DSpark drafts.
_DFLASH_DRAFTS: Final = frozenset(
    (
        *("DFlash2BeamDraftModel", "DFlash2DraftModel", "DFlashDraftModel", "DFlashLagunaForCausalLM"),
        *("MiniMaxDFlash2DraftModel", "MuseGlimmerAssistantModel"),
    )
)
_DSPARK_DRAFTS: Final = frozenset(
    (
        *("DSparkDraftModel", "DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark"),
        *("Lfm2DSparkDraftModel", "LingDSparkModel", "Qwen3DSparkModel"),
    )
)
#: Drafts to whose ids one is added for ``muse_glimmer``, since 0.5.19.
_SHIFTED: Final = frozenset(("DFlash2DraftModel", "MuseGlimmerAssistantModel"))


def read_blocks(
    config: Mapping[str, Any], family: str, n_layers: int, version: str, known: Conventions = BUILTIN
) -> TakenIds:
    """Which ids SGLang finds in the config of a DFlash or DSpark draft.

    From ``dflash_config``, else from the top level; a DSpark draft's ``dspark_target_layer_ids`` come before
    both.  Unlike EAGLE-3's, what is wrong stops the server.
    """
    try:
        chosen = convention_for("sglang", family, DFLASH, version, known)
        dspark = bool(_architectures(config) & _DSPARK_DRAFTS)
        if not dspark and isinstance(chosen, SglangBlocks) and chosen.dspark_only:
            raise ConventionError(f"{family} has no set_dflash_layers_to_capture: the server stops")
        if dspark:
            _require_markov(config)
        taken = _blocks_listed(chosen, config, family, n_layers, version)
        if not dspark or config.get(DSPARK) is None or taken.refusal is not None:
            return taken
        return _blocks_taken(chosen, DSPARK, config[DSPARK], n_layers)
    except ConventionError as error:
        return refused(why(error))


def block_layers(n_layers: int, draft_layers: int) -> list[int]:
    """Ids that a draft of ``draft_layers`` layers takes without a list, ``build_target_layer_ids``.

    Raises:
        ConventionError: the target is too shallow.
    """
    if draft_layers > 1 and n_layers < 4:
        raise ConventionError(
            f"sglang, {DFLASH}: DFlash layer selection requires num_target_layers >= 4, not {n_layers}"
        )
    return spread(n_layers, draft_layers)


def _blocks_listed(
    chosen: Convention, config: Mapping[str, Any], family: str, n_layers: int, version: str
) -> TakenIds:
    nested = _object(config, "dflash_config")
    key: str | None = DFLASH if "target_layer_ids" in nested else DENSE
    value = nested.get("target_layer_ids", config.get(DENSE))
    if value is None:
        key, value = None, block_layers(n_layers, _draft_layers(config))
    taken = _blocks_taken(chosen, key, value, n_layers)
    moved = family == "muse_glimmer" and version != "0.5.18" and _architectures(config) & _SHIFTED
    if not moved or taken.refusal is not None or taken.ids is None:
        return taken
    outputs = _blocks_taken(chosen, key, [number + 1 for number in taken.ids], n_layers)
    return replace(outputs, ids=taken.ids)


def _blocks_taken(chosen: Convention, key: str | None, value: Any, n_layers: int) -> TakenIds:
    """What the model makes of the list; only DSpark's own is not compared with the target's depth."""
    if not isinstance(value, list):
        return TakenIds(chosen.name, key, None, None, f"{value!r} is no list of ids: a ValueError")
    try:
        if key == DSPARK and isinstance(chosen, SglangBlocks):
            captured = chosen.unchecked(value, n_layers)
        else:
            captured = chosen.captured(value, n_layers)
    except ConventionError as error:
        return TakenIds(chosen.name, key, None, None, why(error))
    quirks = captured.quirks
    if key is None:
        quirks = (f"no ids are given: it takes {value}, as many as the draft has layers", *quirks)
    return TakenIds(chosen.name, key, tuple(map(int, value)), replace(captured, quirks=quirks))


def _architectures(config: Mapping[str, Any]) -> set[str]:
    listed = config.get("architectures")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    try:
        return dict(value) if value is not None else {}
    except (TypeError, ValueError):
        return {}


def _draft_layers(config: Mapping[str, Any]) -> int:
    text = config.get("text_config")
    layers = (text if isinstance(text, dict) else config).get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise ConventionError(
            f"sglang, {DFLASH}: there are no ids, and no default either, "
            f"because the draft's num_hidden_layers is {layers!r}"
        )
    return layers


def _require_markov(config: Mapping[str, Any]) -> None:
    nested = _object(config, "dflash_config") | _object(config, "dspark_config")
    rank = config.get("dspark_markov_rank")
    rank = nested.get("markov_rank", config.get("markov_rank", 0)) if rank is None else rank
    if type(rank) is not int or rank < 1:
        raise ConventionError(f"sglang: DSPARK requires markov_rank > 0 in the draft config, not {rank!r}")


# vLLM


@dataclass(frozen=True, slots=True)
class Ids:
    """What a runner found: the key whose convention reads it, where it stood, and the value."""

    key: str
    at: str
    value: Any


#: Places where a runner looks: EAGLE-3's list at the top or in ``eagle_config``; DFlash's, as it is or with
#: one added; DSpark's two; ``layer_ids`` of an object.
Place = Literal["top", "nested", "dflash", "dflash+1", "dspark+1", "dense+1", "dflash_config", "eagle_config"]


@dataclass(frozen=True, kw_only=True)
class Vllm(ReaderRow):
    """One of vLLM's two runners, V1 and V2, which takes the target's default layers where it finds nothing.

    A config in speculators' format is rewritten first.  The speculative method is the user's to choose; it is
    taken for the one that the architecture names.  ``benchmarks/vllm_versions.py`` compares every version.
    """

    #: Where it looks; what is found first counts, but a *nested* list replaces one of DFlash's.
    places: tuple[Place, ...] = ("top",)
    #: Speculators types that it rewrites, ``SUPPORTED_SPECULATORS_TYPES``.
    types: tuple[str, ...] = ("eagle3", "peagle", "dflash", "dflash2", "dspark")
    #: ``model_type`` values of layers that it finds an EAGLE-3 draft for, since 0.24; empty for any.
    layers: tuple[str, ...] = ("qwen3", "llama")
    #: Whether ``eagle_config.use_aux_hidden_state`` decides what an EAGLE-3 head is fed.
    flag: bool = True
    #: Whether ids are sorted before they are compared, so that a mixed list fails (since 0.30).
    sorts: bool = True
    #: Whether it runs DSpark.
    dspark: bool = True
    #: Whether DSpark's ids are taken as they are for a ``deepseek_v41`` (since 0.30).
    as_is: bool = False

    def read(
        self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions = BUILTIN
    ) -> TakenIds:
        """What the engine takes from a config; see `Reader.read`."""
        try:
            draft = rewritten(config, self.types, self.layers)
            method = _method(config, draft)
            if method == "dspark" and not self.dspark:
                return refused("this runner of this version does not run DSpark")
            if self.flag and method == "eagle3" and _fed_the_last_state(draft):
                final = Captured((Point("final_norm"),), (f"{_FLAG} is false",))
                return TakenIds("vllm", _FLAG, None, final)
            of_draft = method == "dspark" and draft.get("model_type") == "deepseek_v41"
            found = self._find(draft, self.as_is and (family == "deepseek_v41" or of_draft))
        except _FAILURES as error:
            return refused(f"it stops while it reads the head's config: {_shown(error)}")
        try:
            return self._taken(found, family, n_layers, known)
        except _FAILURES as error:
            return refused(f"it stops while it sets the layers: {_shown(error)}")

    def _find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """The ids in a rewritten config.  Only a list counts; anything else that is set ends the search."""
        found: Ids | None = None
        for place in self.places:
            if found is not None and found.value and not (place == "nested" and found.key != TOP):
                continue
            if place == "nested":
                eagle = draft.get("eagle_config")
                if eagle and isinstance(eagle, dict):
                    found = Ids(TOP, NESTED, eagle.get(TOP))
            else:
                found = _at(place, draft, as_is)
        return found if found is not None and found.value and isinstance(found.value, list | tuple) else None

    def _taken(self, found: Ids | None, family: str, n_layers: int, known: Conventions) -> TakenIds:
        chosen = self.convention(known, family, found.key if found else TOP)
        if found is None:
            return read_list(chosen, None, None, n_layers)
        values = list(found.value)
        if isinstance(chosen, VllmBackend):
            _ = [value - 1 for value in values]  # fails on what is no number, as vLLM does
        elif self.sorts:
            _ = sorted(set(values))  # fails on what cannot be compared, as vLLM does
        ids = tuple(int(value) for value in values if _never_matches(value) is None)
        quirks = tuple(text for value in values if (text := _never_matches(value)))
        if not ids:
            nothing = f"{chosen.name}: {found.at} is {values}, of which nothing names a layer"
            return TakenIds(chosen.name, found.at, ids, None, nothing)
        taken = read_list(chosen, found.at, ids, n_layers)
        if taken.captured is None:
            return taken
        captured = replace(taken.captured, quirks=(*quirks, *taken.captured.quirks))
        return replace(taken, captured=captured)


def _at(place: Place, draft: Mapping[str, Any], as_is: bool) -> Ids:
    if place == "top":
        return Ids(TOP, TOP, draft.get(TOP))
    if place in ("dflash", "dflash+1"):
        ids = _member(draft, "dflash_config", "target_layer_ids")
        return _plus_one(DFLASH, ids or []) if place == "dflash+1" else Ids(TOP, DFLASH, ids)
    if place in ("dspark+1", "dense+1"):
        key = DSPARK if place == "dspark+1" else DENSE
        ids = draft.get(key) or []
        return Ids(TOP, key, list(ids)) if place == "dspark+1" and as_is else _plus_one(key, ids)
    return Ids(TOP, f"{place}.layer_ids", _member(draft, place, "layer_ids"))


def _plus_one(key: str, values: Any) -> Ids:
    """The ids under a key whose convention adds one."""
    written = list(values)
    _ = [value + 1 for value in written]  # fails on what is no number, as the runner does
    return Ids(key, key, written)


def _member(draft: Mapping[str, Any], name: str, key: str) -> Any:
    nested = draft.get(name)
    return nested.get(key) if nested and isinstance(nested, dict) else None


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


def rewritten(config: Mapping[str, Any], types: Sequence[str], layers: Sequence[str]) -> Mapping[str, Any]:
    """The config that vLLM's runners see: the same, unless it is in speculators' format.

    ``vllm/transformers_utils/configs/speculators/{base,algos}.py``.  Told by a ``speculators_config`` that is
    not null.  What remains is ``transformer_layer_config`` with what the type's function adds.

    Args:
        config: the head's ``config.json``.
        types: the speculators types that this version knows.
        layers: the ``model_type`` values of layers that it has an EAGLE-3 draft for; empty for any.

    Raises:
        ValueError: it knows no such type, or no draft of that ``model_type``.
        KeyError: a key is missing that the type needs.
        TypeError: a value is not of the type that it needs.
    """
    if config.get("speculators_config") is None:
        return config
    kind = config.get("speculators_model_type")
    hash(kind)  # looked up in a dict
    if kind not in types:
        raise ValueError(f"speculators_model_type is {kind!r}, none of {', '.join(types)}")
    inner = config.get("transformer_layer_config", {})
    if not isinstance(inner, dict):
        raise TypeError(f"transformer_layer_config is {inner!r}, no object")
    draft = dict(inner)
    if kind in ("eagle3", "peagle"):
        model_type = draft.get("model_type", "llama")
        if layers and model_type not in layers:
            raise ValueError(f"it has no {kind} draft for layers of model_type {model_type!r}")
        draft["architectures"] = [kind]
        if kind == "peagle":
            draft["pard_token"] = config["mask_token_id"]
        if config.get(TOP):
            draft[TOP] = config[TOP]
        return draft
    # The ids under the drafts' own keys are read by the draft alone: the runners find the first list.
    draft[TOP] = config["aux_hidden_state_layer_ids"]
    below = [number - 1 for number in draft[TOP]]
    draft["architectures"] = [kind]
    if kind == "dspark":
        draft[DENSE] = below
    else:
        draft["dflash_config"] = {"mask_token_id": config["mask_token_id"], "target_layer_ids": below}
    return draft


# The others


@dataclass(frozen=True, kw_only=True)
class Specforge(ReaderRow):
    """How a training run takes a draft's config, where the run names no layers of its own."""

    def read(
        self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions = BUILTIN
    ) -> TakenIds:
        """What the engine takes from a config; see `Reader.read`."""
        architectures = config.get("architectures")
        named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        block = any(kind in named for kind in ("DFlash", "DSpark", "Domino"))
        key = DFLASH if block else NESTED
        chosen = self.convention(known, family, key)
        outer, _, inner = key.partition(".")
        nested = config.get(outer) or {}
        if not isinstance(nested, dict):
            return TakenIds(chosen.name, key, None, None, f"{outer} is {nested!r}, no object")
        ids = nested.get(inner)
        if ids is None and block:
            return TakenIds(chosen.name, key, None, None, f"{key} is {ids!r}, no list")
        return read_list(chosen, None if ids is None else key, ids, n_layers)


@dataclass(frozen=True, kw_only=True)
class LlamaCpp(ReaderRow):
    """What llama.cpp's converter makes of a config: EAGLE-3's top-level list, DFlash's nested one first."""

    #: What conversion/__init__.py sends to the module that knows EAGLE-3, and to the one that knows DFlash.
    eagle3: tuple[str, ...]
    dflash: tuple[str, ...]

    def read(
        self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions = BUILTIN
    ) -> TakenIds:
        """What the engine takes from a config; see `Reader.read`."""
        architectures = config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        if first in self.dflash:
            nested = config.get("dflash_config", {})
            if not isinstance(nested, Mapping):
                return refused(f"dflash_config is {nested!r}, no object")
            key = DFLASH if "target_layer_ids" in nested else DENSE
            ids = nested["target_layer_ids"] if key == DFLASH else config.get(DENSE)
            return read_list(
                self.convention(known, family, DFLASH), key if ids else None, ids or None, n_layers
            )
        if first not in self.eagle3:
            return refused(f"its converter has no class for a draft of architecture {first!r}")
        inner = config.get("transformer_layer_config")
        merged = {**config, **inner} if isinstance(inner, Mapping) else config
        if "draft_vocab_size" not in merged or merged.get("num_hidden_layers") != 1:
            return refused(
                "its converter takes a config without draft_vocab_size, or with more than one layer, "
                "for a plain Llama"
            )
        ids = config.get(TOP)
        return read_list(self.convention(known, family, TOP), TOP if ids else None, ids or None, n_layers)


@dataclass(frozen=True, kw_only=True)
class Dflash(ReaderRow):
    """The list of the draft's config, or one spread over the layers that the config says the target has."""

    #: The key of its convention.
    key: str
    #: Whether it does without the list.
    spreads: bool = False

    def read(
        self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions = BUILTIN
    ) -> TakenIds:
        """What the engine takes from a config; see `Reader.read`."""
        chosen = self.convention(known, family, self.key)
        nested = config.get("dflash_config")
        if not isinstance(nested, Mapping):
            return TakenIds(chosen.name, None, None, None, f"dflash_config is {nested!r}, no object")
        if "target_layer_ids" in nested:
            ids = nested["target_layer_ids"]
            if ids is None:
                return TakenIds(chosen.name, DFLASH, None, None, f"{DFLASH} is {ids!r}, no list")
            return read_list(chosen, DFLASH, ids, n_layers)
        if not self.spreads:
            return read_list(chosen, None, None, n_layers)
        depth, of_draft = config.get("num_target_layers"), config.get("num_hidden_layers")
        if type(depth) is not int or type(of_draft) is not int or depth < 1 or of_draft < 1:
            text = (
                f"{self.name}: without {DFLASH} it needs num_target_layers and num_hidden_layers, "
                f"which are {depth!r} and {of_draft!r}"
            )
            return TakenIds(chosen.name, None, None, None, text)
        own = spread(depth, of_draft)
        taken = replace(read_list(chosen, None, own, n_layers), ids=None)
        if taken.captured is None:
            return taken
        quirks = (f"no ids are given: it takes {own}", *taken.captured.quirks)
        return replace(taken, captured=replace(taken.captured, quirks=quirks))


@dataclass(frozen=True, kw_only=True)
class NoList(ReaderRow):
    """An engine that takes layers from a setting or its default, never from a head's config."""

    def read(
        self, config: Mapping[str, Any], family: str, n_layers: int, known: Conventions = BUILTIN
    ) -> TakenIds:
        """What it captures where the caller names no layers."""
        return read_list(self.convention(known, family), None, None, n_layers)


READERS: Final[Mapping[str, type[ReaderRow]]] = {
    "sglang": Sglang,
    "vllm": Vllm,
    "specforge": Specforge,
    "llama_cpp": LlamaCpp,
    "dflash": Dflash,
    "no_list": NoList,
}


def builtin_readers() -> list[Reader]:
    """The core's own, from the rows of ``ids.toml``."""
    made: list[Reader] = []
    for row in table()["reader"]:
        found = spelled_out(row)
        reader = READERS[found.pop("rule")](**found)
        made += reader.in_runs(rows()) if isinstance(reader, Sglang) else [reader]
    return made


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
