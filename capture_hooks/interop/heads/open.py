"""Opening a head's directory, whoever wrote it: its config and headers, not its weights; no target needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ...errors import HeadError
from ...heads.config import read_section
from ...heads.files import TensorInfo, read_config
from .contract import Flags, Layout, RawHead, Stored
from .weights import find_tensors

#: Where speculators keeps the draft's Llama-style fields.
NESTED: Final = "transformer_layer_config"
#: The legacy names of SGLang's per-input norms (``sglang/srt/models/llama_eagle3.py``, ``legacy_name_map``).
_LEGACY: Final = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_NUMBERS: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "max_position_embeddings",
)


def open_head(directory: str | os.PathLike[str], *, pickles: bool = False) -> RawHead:
    """Read what a head's directory says of itself, in whichever library's layout.

    Values of the wrong type are kept and named in ``problems``: a report can show them.

    Args:
        directory: holds ``config.json`` and safetensors files.
        pickles: open files that ``torch.save`` wrote, where there are no others.

    Raises:
        HeadError: it is no head (no config, no draft layer), a file is missing, damaged or not what it seems,
            only pickles are there (without ``pickles``), or two tensors have the same canonical name.
    """
    place = Path(directory)
    config = read_config(place)
    section = read_section(config, str(place))
    names: dict[str, Stored] = {}
    tensors: dict[str, TensorInfo] = {}
    on_disk = find_tensors(place, pickles)
    for name, (stored, info) in on_disk.items():
        short = canonical(name)
        if short in names:
            raise HeadError(f"{place}: {names[short].name} and {name} are two tensors of one name, {short}")
        names[short], tensors[short] = stored, info
    if not {"fc.weight", "midlayer.hidden_norm.weight"} & tensors.keys():
        raise HeadError(
            f"{place} has neither fc.weight nor the first layer's hidden_norm: it is no EAGLE-3 head "
            "(is it a whole model?)"
        )
    if section is not None:
        layout: Layout = "capture-hooks"
    elif "speculators_model_type" in config:
        layout = "speculators"
    elif any(name.startswith("midlayer.") for name in (n.removeprefix("model.") for n in on_disk)):
        layout = "eagle"
    elif any(name.startswith("midlayer.") for name in tensors):
        layout = "modelopt"
    else:
        raise HeadError(f"{place} has neither midlayer.* nor layers.0.*: it is no EAGLE-3 head")
    problems: list[str] = []
    fields = _fields(config, problems)
    flags = _flags(layout, config, problems)
    return RawHead(
        layout, place, config, fields, flags, layer_ids(config), tensors, names, section, tuple(problems)
    )


def canonical(name: str) -> str:
    """A tensor's one name, whoever wrote it."""
    short = name.removeprefix("model.")
    head, _, rest = short.partition(".")
    if head in _LEGACY:
        return f"{_LEGACY[head]}.{rest}"
    return "midlayer." + short.removeprefix("layers.0.") if short.startswith("layers.0.") else short


def layer_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Whatever is called ``...layer_ids``, at the top or one object down, by dotted key; null is absent.

    Every library's key ends so: ``eagle_config.eagle_aux_hidden_state_layer_ids`` (SGLang, SpecForge,
    ModelOpt), ``eagle_aux_hidden_state_layer_ids`` (vLLM, speculators), ``dflash_config.target_layer_ids``,
    ``dspark_target_layer_ids``, ``aux_hidden_states_layer_ids`` (AngelSlim), ``aux_hidden_state_layer_ids``.
    """
    return dict(_walk(config))


def _walk(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and key != "capture":
            yield from ((f"{key}.{k}", v) for k, v in value.items() if _is_ids(k, v))
        if _is_ids(key, value):
            yield key, value


def _is_ids(key: str, value: Any) -> bool:
    return key.endswith("layer_ids") and value is not None


def _fields(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    nested = config.get(NESTED)
    if nested is not None and not isinstance(nested, dict):
        problems.append(f"{NESTED} is {_short(nested)}, not an object")
        nested = None
    top = {k: v for k, v in config.items() if k not in (NESTED, "capture") and not isinstance(v, dict)}
    top |= {k: config[k] for k in ("rope_parameters", "rope_scaling") if k in config}
    # Nested values describe the draft; speculators' own top-level keys have other names.
    fields = {**top, **(nested or {})}
    for name in _NUMBERS:
        value = fields.get(name)
        if value is not None and (type(value) is not int or value < 1):
            problems.append(f"{name} is {_short(value)}, not a positive whole number")
    for name in ("rms_norm_eps", "rope_theta"):
        value = fields.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            problems.append(f"{name} is {_short(value)}, not a number")
    for name in ("rope_parameters", "rope_scaling"):
        if fields.get(name) is not None and not isinstance(fields[name], dict):
            problems.append(f"{name} is {_short(fields[name])}, not an object")
    return fields


def _flags(layout: Layout, config: Mapping[str, Any], problems: list[str]) -> Flags:
    eagle = config.get("eagle_config")
    if eagle is not None and not isinstance(eagle, dict):
        problems.append(f"eagle_config is {_short(eagle)}, not an object")
    eagle = eagle if isinstance(eagle, dict) else {}

    def one(*places: tuple[str, Mapping[str, Any], str]) -> bool | None:
        """The first that is said; one that disagrees with it is a problem."""
        found: list[tuple[str, bool]] = []
        for prefix, holder, key in places:
            value = holder.get(key)
            if isinstance(value, bool):
                found.append((prefix + key, value))
            elif value is not None:
                problems.append(f"{prefix}{key} is {_short(value)}, not true or false")
        for name, value in found[1:]:
            if value != found[0][1]:
                problems.append(f"{found[0][0]} is {_json(found[0][1])} and {name} is {_json(value)}")
        return found[0][1] if found else None

    nested = "eagle_config."
    fed_back = one(
        (nested, eagle, "norm_output"), *([("", config, "norm_output")] if layout != "eagle" else [])
    )
    return Flags(
        norm_before_residual=one(("", config, "norm_before_residual")),
        norm_before_fc=one((nested, eagle, "norm_before_fc"), ("", config, "norm_before_fc")),
        fc_norm=one(("", config, "fc_norm"), ("", config, "use_aux_norm")),
        norm_output=fed_back,
        norm_before_lm_head=one((nested, eagle, "use_last_layernorm")),
        use_aux_hidden_state=one(
            (nested, eagle, "use_aux_hidden_state"), ("", config, "use_aux_hidden_state")
        ),
    )


def _json(value: bool) -> str:
    return "true" if value else "false"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
