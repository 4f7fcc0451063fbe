"""Which ids SGLang finds in the config of a DFlash or DSpark draft, told by its architecture.

From ``dflash_config``, else from the top level; a DSpark draft's ``dspark_target_layer_ids`` come before
both.  Unlike EAGLE-3's, what is wrong stops the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ...errors import ConventionError
from ..contract import Convention, Reading
from ..lookup import convention_for
from .dflash import KEY, Dflash, default_layers

PREFIXED: Final = "dspark_target_layer_ids"
#: ``EntryClass`` of models/dflash.py, and of the models of DSpark drafts.
DFLASH: Final = frozenset(
    (
        *("DFlash2BeamDraftModel", "DFlash2DraftModel", "DFlashDraftModel", "DFlashLagunaForCausalLM"),
        *("MiniMaxDFlash2DraftModel", "MuseGlimmerAssistantModel"),
    )
)
DSPARK: Final = frozenset(
    (
        *("DSparkDraftModel", "DSparkMiniMaxDraftModel", "DeepseekV4ForCausalLMDSpark"),
        *("Lfm2DSparkDraftModel", "LingDSparkModel", "Qwen3DSparkModel"),
    )
)
_SHIFTED: Final = frozenset(("DFlash2DraftModel", "MuseGlimmerAssistantModel"))


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether this is a DFlash or DSpark draft's config, so that no EAGLE-3 ids are looked for."""
    return bool(_architectures(config) & (DFLASH | DSPARK))


def read_draft(config: Mapping[str, Any], family: str, n_layers: int, version: str) -> Reading:
    """As `Reader.read`, for a config of which `is_draft` holds."""
    try:
        chosen = convention_for("sglang", family, KEY, version)
        if not _architectures(config) & DSPARK:
            if chosen.name.startswith("sglang.dspark"):
                raise ConventionError(f"{family} has no set_dflash_layers_to_capture: the server stops")
            return _listed(chosen, config, family, n_layers, version)
        _require_markov(config)
        reading = _listed(chosen, config, family, n_layers, version)
        if config.get(PREFIXED) is None or reading.refusal is not None:
            return reading
        return _taken(chosen, PREFIXED, config[PREFIXED], n_layers)
    except ConventionError as error:
        return Reading(None, None, None, None, str(error))


def _listed(
    chosen: Convention, config: Mapping[str, Any], family: str, n_layers: int, version: str
) -> Reading:
    nested = _nested(config, "dflash_config")
    key: str | None = KEY if "target_layer_ids" in nested else "target_layer_ids"
    value = nested.get("target_layer_ids", config.get("target_layer_ids"))
    if value is None:
        key, value = None, default_layers(n_layers, _draft_layers(config))
    reading = _taken(chosen, key, value, n_layers)
    moved = family == "muse_glimmer" and version != "0.5.18" and _architectures(config) & _SHIFTED
    if not moved or reading.refusal is not None or reading.ids is None:
        return reading
    outputs = _taken(chosen, key, [number + 1 for number in reading.ids], n_layers)
    return replace(outputs, ids=reading.ids)


def _taken(chosen: Convention, key: str | None, value: Any, n_layers: int) -> Reading:
    """What the model makes of the list; only the prefixed one is not compared with the target's depth."""
    if not isinstance(value, list):
        return Reading(chosen.name, key, None, None, f"{value!r} is no list of ids: a ValueError")
    try:
        if key == PREFIXED and isinstance(chosen, Dflash):
            captured = chosen.unchecked(value, n_layers)
        else:
            captured = chosen.captured(value, n_layers)
    except ConventionError as error:
        return Reading(chosen.name, key, None, None, str(error))
    quirks = captured.quirks
    if key is None:
        quirks = (f"no ids are given: it takes {value}, as many as the draft has layers", *quirks)
    return Reading(chosen.name, key, tuple(map(int, value)), replace(captured, quirks=quirks))


def _architectures(config: Mapping[str, Any]) -> set[Any]:
    listed = config.get("architectures")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _nested(config: Mapping[str, Any], key: str) -> dict[str, Any]:
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
            f"sglang, {KEY}: there are no ids, and no default either, "
            f"because the draft's num_hidden_layers is {layers!r}"
        )
    return layers


def _require_markov(config: Mapping[str, Any]) -> None:
    nested = _nested(config, "dflash_config") | _nested(config, "dspark_config")
    rank = config.get("dspark_markov_rank")
    rank = nested.get("markov_rank", config.get("markov_rank", 0)) if rank is None else rank
    if type(rank) is not int or rank < 1:
        raise ConventionError(f"sglang: DSPARK requires markov_rank > 0 in the draft config, not {rank!r}")
