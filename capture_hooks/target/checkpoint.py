"""Shape and fingerprint of a target from its checkpoint: the weights, which an engine loads, stay on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..capture import find_anatomy
from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..errors import ModelError
from .opening import load_target, locate, skeleton


def checkpoint_fingerprint(model: str, dtype: str) -> TargetFingerprint:
    """The fingerprint that `TargetFingerprint.of` takes of the model loaded in ``dtype``.

    Where the checkpoint's tensors are the model's parameters, in that dtype, they are mapped into memory and
    only the sampled values are read.  Else (parameters that transformers renames, fuses or casts, quantised
    weights, names on the hub) the model is loaded once, on the CPU.

    Raises:
        ModelError: there is no such model.
    """
    hollow = skeleton(model)
    if _fill(hollow, mapped_tensors(model), getattr(torch, dtype)):
        return TargetFingerprint.of(find_anatomy(hollow))
    return TargetFingerprint.of(find_anatomy(load_target(model, dtype, "cpu")))


def hollow_anatomy(model: str) -> Anatomy:
    """The anatomy of a checkpoint's `skeleton`: shapes without values.

    Raises:
        ModelError: there is no such model.
        BindError: no anatomy is known for it.
    """
    return find_anatomy(skeleton(model))


def final_norm_of(model: str, dtype: torch.dtype) -> nn.Module:
    """The norm between the stream's end and the output layer, of Hugging Face's class, in ``dtype``.

    Only its own tensors are read where the checkpoint holds them under their own names; else the model is
    loaded once, on the CPU.

    Raises:
        ModelError: there is no such model, or its family has no such norm.
    """
    anatomy = hollow_anatomy(model)
    if anatomy.final_norm is None or anatomy.final_norm_name is None:
        raise ModelError(f"{model}: {type(anatomy.model).__name__} has no norm before its output layer")
    own = {f"{anatomy.final_norm_name}.{name}": name for name in anatomy.final_norm.state_dict()}
    found = {} if _renamed(anatomy.model) else mapped_tensors(model)
    if own.keys() <= found.keys():
        state = {short: found[name].to(dtype) for name, short in own.items()}
        anatomy.final_norm.load_state_dict(state, assign=True)
        return anatomy.final_norm
    norm = find_anatomy(load_target(model, str(dtype).removeprefix("torch."), "cpu")).final_norm
    assert norm is not None
    return norm


def mapped_tensors(model: str) -> dict[str, Tensor]:
    """A checkpoint's tensors, mapped into memory; empty where they are not those of safetensors files."""
    if locate(model).adapter is not None:
        return {}
    directory = Path(model)
    index = directory / "model.safetensors.index.json"
    try:
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else ["model.safetensors"]
        )
        found: dict[str, Tensor] = {}
        for name in names:
            with safe_open(directory / name, framework="pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a mapping
    except (OSError, ValueError, KeyError, SafetensorError):
        return {}
    return found


def _fill(hollow: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
    """Make the tensors the model's own; whether they are all it has, as it would have loaded them."""
    if getattr(hollow.config, "quantization_config", None) is not None or _renamed(hollow):
        return False
    if any(t.dtype != dtype for t in tensors.values()):
        return False
    try:
        hollow.load_state_dict(dict(tensors), strict=False, assign=True)
    except RuntimeError:  # another shape
        return False
    hollow.tie_weights()
    return not any(tensor.is_meta for tensor in hollow.state_dict().values())


def _renamed(hollow: Any) -> bool:
    """Whether transformers maps this family's checkpoints to other names or shapes."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    return bool(get_model_conversion_mapping(hollow, add_legacy=False))
