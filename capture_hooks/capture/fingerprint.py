"""Which target model a dump or a head belongs to: its shape and its weights, in under a kilobyte.

The weights are judged by a sample: a few values of every parameter, at places fixed by its shape.  A
different checkpoint, a fine-tune or a merged adapter moves many of them; an edit of single values that
were not sampled goes unseen.  Three readings of the same sample answer three questions:

* ``weights``: are these the same values, bit for bit?
* ``weights_bf16``: are they the same once both are rounded to bfloat16?  True for a float32 checkpoint
  and its bfloat16 cast, because rounding to bfloat16 twice is rounding once.
* ``sample``: if neither, how far apart are they?  A float16 cast changes each value by half a unit in its
  last place at most, a fine-tune changes small values by much more.
"""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections.abc import Iterator
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ..errors import BindError
from .anatomy import Anatomy
from .weights import settled

#: Values read from each parameter.
PER_PARAMETER = 64
#: Values kept in `TargetFingerprint.sample`, spread over all that were read.
KEPT = 64
#: Largest relative change that a cast to each dtype makes: half a unit in the last place, relative.
_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
#: Half of float16's smallest number, below which its rounding is no longer relative.
_FLOAT16_STEP = 2.0**-25

_WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer)(?=\.|$)"
)
_SHAPE = ("architecture", "model_type", "n_layers", "hidden_size", "vocab_size")


class TargetFingerprint(BaseModel):
    """Shape and weights of one target model: equal fingerprints mean the same model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str = Field(description="class of the model, wrappers peeled")
    model_type: str = Field(description="the configuration's model_type; empty where there is none")
    n_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    dtype: str = Field(description="dtype of the token embedding, e.g. bfloat16")
    structure: str = Field(description="SHA-256 over the names and shapes of all parameters")
    weights: str = Field(description="SHA-256 over the sampled values as float32")
    weights_bf16: str = Field(description="SHA-256 over the sampled values rounded to bfloat16")
    sample: str = Field(description=f"base64 of {KEPT} sampled values, little-endian float32")

    @classmethod
    def of(cls, anatomy: Anatomy) -> Self:
        """Take the fingerprint of a model.

        Names of wrappers (compiled, checkpointed, sharded modules, PEFT's ``base_layer``) are left out.
        Adapters count as they compute now: the fingerprint is that of the merged model, and of the base where
        they are disabled or change nothing.
        On a sharded model (FSDP2) this gathers parameters, so every process must call it.

        Raises:
            BindError: for a parameter whose values are not in memory (on the ``meta`` device).
        """
        structure, exact, rounded = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
        values = []
        for name, tensor in sorted(_stored(anatomy.model), key=lambda item: item[0]):
            structure.update(f"{name}{tuple(tensor.shape)};".encode())
            read = _sampled(name, tensor)
            exact.update(f"{name};".encode() + _bytes(read))
            rounded.update(f"{name};".encode() + _bytes(read.bfloat16().float()))
            values.append(read)
        everything = torch.cat(values)
        return cls(
            architecture=_architecture(anatomy.model),
            model_type=str(getattr(getattr(anatomy.model, "config", None), "model_type", "") or ""),
            n_layers=anatomy.n_layers,
            hidden_size=anatomy.hidden_size,
            vocab_size=anatomy.vocab_size,
            dtype=str(next(anatomy.embedding.parameters()).dtype).removeprefix("torch."),
            structure=structure.hexdigest(),
            weights=exact.hexdigest(),
            weights_bf16=rounded.hexdigest(),
            sample=base64.b64encode(_bytes(everything[_spread(everything.numel(), KEPT)])).decode(),
        )

    def distance(self, other: Self) -> float:
        """Size of the difference between the two samples relative to the samples: about 2**-9 for a
        bfloat16 cast, 2**-12 for a float16 cast, order 1 for unrelated weights."""
        ours, theirs = _decode(self.sample), _decode(other.sample)
        if ours.shape != theirs.shape:
            return float("inf")
        size = max(float(ours.norm()), float(theirs.norm()), 1e-30)
        return float((ours - theirs).norm()) / size

    def same_weights(self, other: Self) -> bool:
        """Whether the weights are the same, or one set is the other in lower precision."""
        if self.structure != other.structure:
            return False
        if self.weights == other.weights or self.weights_bf16 == other.weights_bf16:
            return True
        return self.dtype != other.dtype and self._casts_apart(other)

    def _casts_apart(self, other: Self) -> bool:
        """Whether each sampled value differs by no more than rounding to the two dtypes explains."""
        ours, theirs = _decode(self.sample), _decode(other.sample)
        relative = _ROUNDING.get(self.dtype, 0.0) + _ROUNDING.get(other.dtype, 0.0)
        allowed = relative * torch.maximum(ours.abs(), theirs.abs()) + _FLOAT16_STEP
        return ours.shape == theirs.shape and bool(((ours - theirs).abs() <= allowed).all())

    def differences(self, other: Self) -> list[str]:
        """Sentences naming what differs and both values; empty for the same model in the same dtype."""
        found = [
            f"{name} is {getattr(self, name)!r} here and {getattr(other, name)!r} there"
            for name in _SHAPE
            if getattr(self, name) != getattr(other, name)
        ]
        if self.structure != other.structure:
            found.append(
                "the parameters differ in name or shape "
                f"(structure {self.structure[:12]} here, {other.structure[:12]} there)"
            )
        elif self.weights != other.weights:
            hashes = f"(weights {self.weights[:12]} here, {other.weights[:12]} there)"
            if self.same_weights(other):
                found.append(
                    "the weights are the same to the precision of a cast "
                    f"but not equal: {self.dtype} here, {other.dtype} there {hashes}"
                )
            else:
                found.append(f"the weights differ by {self.distance(other):.2g} of their size {hashes}")
        if self.dtype != other.dtype and not any("cast" in sentence for sentence in found):
            found.append(f"dtype is {self.dtype!r} here and {other.dtype!r} there")
        return found


def _stored(module: nn.Module, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Names and values of everything a checkpoint of a model would hold, its adapters merged into it."""
    try:
        plain = settled(module)
    except Exception:  # an adapter that PEFT cannot merge: its own tensors stand for it
        plain = module
        yield from _strengths(module, path)
    prefix = f"{path}." if path else ""
    # Tied weights appear under each of their names, so that a tied and an untied copy of one model agree.
    for name, parameter in plain.named_parameters(recurse=False, remove_duplicate=False):
        yield _peeled(prefix + name), parameter
    # Quantised weights are often buffers; masks and counters are not weights.
    for name, buffer in plain.named_buffers(recurse=False, remove_duplicate=False):
        transient = name in plain._non_persistent_buffers_set
        if not transient and buffer.dtype not in (torch.bool, torch.int64):
            yield _peeled(prefix + name), buffer
    for name, child in plain._modules.items():
        if child is not None:
            yield from _stored(child, prefix + name)


def _strengths(layer: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """What an adapter's output is multiplied with, which is no tensor of it; 0 where it is not active."""
    off, active = getattr(layer, "disable_adapters", False), getattr(layer, "active_adapters", ())
    for name, value in getattr(layer, "scaling", {}).items():
        yield f"{path}.scaling.{name}", torch.tensor([0.0 if off or name not in active else float(value)])


def _peeled(name: str) -> str:
    return _WRAPPERS.sub("", name).lstrip(".")


def _sampled(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise BindError(
            f"the values of parameter {name} are not in memory (meta device, as with offloading to disk); "
            "load the model without disk offloading to take its fingerprint"
        )
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    flat = whole.detach().reshape(-1)
    return flat[_spread(flat.numel(), PER_PARAMETER).to(flat.device)].to("cpu", torch.float32)


def _spread(size: int, count: int) -> Tensor:
    """Up to ``count`` places spread over ``size``; integer arithmetic, so equal on every machine."""
    if size <= count:
        return torch.arange(size)
    return torch.arange(count) * (size - 1) // (count - 1)


def _bytes(values: Tensor) -> bytes:
    return struct.pack(f"<{values.numel()}f", *values.tolist())


def _decode(sample: str) -> Tensor:
    raw = base64.b64decode(sample)
    return torch.tensor(struct.unpack(f"<{len(raw) // 4}f", raw), dtype=torch.float64)


def _architecture(model: nn.Module) -> str:
    # FSDP2 derives a class of its own from the model's.
    return next(
        cls.__name__ for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed")
    )
