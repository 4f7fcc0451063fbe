"""What llama.cpp's converter makes of a head's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...errors import ConventionError
from ..contract import Convention, Rank, Reader, Reading
from .llama_cpp import CONVENTIONS, LlamaCpp, LlamaCppDflash

#: What conversion/__init__.py sends to the module that knows EAGLE-3, and to the one that knows DFlash.
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM")
_DFLASH = ("DFlashDraftModel", "DFlash2DraftModel")


class LlamaCppReader(Reader):
    """EAGLE-3's top-level list or the default layers; DFlash's nested list before its top-level one."""

    name = "llama_cpp"
    library = LlamaCpp.library
    versions = LlamaCpp.versions
    source = (
        "ggml-org/llama.cpp 0c1e57098: conversion/llama.py:50-83, conversion/qwen.py:664,735-738, "
        "conversion/__init__.py:57"
    )
    rank: ClassVar[Rank] = "read"
    read_on = LlamaCpp.read_on

    def read(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        """See `Reader.read`."""
        architectures = config.get("architectures")
        first = architectures[0] if isinstance(architectures, list) and architectures else None
        if first in _DFLASH:
            return self._dflash(config, family, n_layers)
        if first not in _EAGLE3:
            return _refused(f"its converter has no class for a draft of architecture {first!r}")
        inner = config.get("transformer_layer_config")
        merged = {**config, **inner} if isinstance(inner, Mapping) else config
        if "draft_vocab_size" not in merged or merged.get("num_hidden_layers") != 1:
            return _refused(
                "its converter takes a config without draft_vocab_size, or with more than one layer, "
                "for a plain Llama"
            )
        chosen = _of(LlamaCpp.key, family)
        ids = config.get(LlamaCpp.key)
        if not ids:
            return _reading(chosen, None, None, n_layers)
        return _reading(chosen, LlamaCpp.key, ids, n_layers)

    def _dflash(self, config: Mapping[str, Any], family: str, n_layers: int) -> Reading:
        chosen = _of(LlamaCppDflash.key, family)
        nested = config.get("dflash_config", {})
        if not isinstance(nested, Mapping):
            return _refused(f"dflash_config is {nested!r}, no object")
        if "target_layer_ids" in nested:
            key, ids = LlamaCppDflash.key, nested["target_layer_ids"]
        else:
            key, ids = "target_layer_ids", config.get("target_layer_ids", [])
        return _reading(chosen, key if ids else None, ids or None, n_layers)


def _of(key: str, family: str) -> Convention:
    mine = [c for c in CONVENTIONS if c.key == key]
    named = [c for c in mine if family in c.families]
    return (named or [c for c in mine if not c.families])[0]


def _reading(chosen: Convention, key: str | None, ids: Any, n_layers: int) -> Reading:
    if ids is not None and not isinstance(ids, list | tuple):
        return Reading(chosen.name, key, None, None, f"{key} is {ids!r}, no list")
    written = None if ids is None else tuple(ids)
    try:
        found = chosen.default(n_layers) if written is None else chosen.captured(written, n_layers)
    except ConventionError as error:
        return Reading(chosen.name, key, written, None, str(error))
    return Reading(chosen.name, key, written, found)


def _refused(why: str) -> Reading:
    return Reading(None, None, None, None, why)
