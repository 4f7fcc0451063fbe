"""One shard: a safetensors file that holds whole sequences, end to end.

=============  ==================  ==========================================================
tensor         shape               row t
=============  ==================  ==========================================================
``states``     [N, C]              captured inputs at token t, columns in spec order
``target``     [N, H]              state at the spec's target point (absent where an input is it)
``token_ids``  [N] int64           token x[t]
``loss_mask``  [N] bool            whether x[t] is a token the head should learn to predict
``argmax``     [N] int64           the target's greedy next token after row t
``starts``     [S+1] int64         offsets of the sequences: 0 ... N
=============  ==================  ==========================================================
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import StoreError
from .files import replacing

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CODES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
#: Widest elements first, so that every tensor of the file is aligned for a memory map.
_ORDER: Final = ("argmax", "starts", "token_ids", "states", "target", "loss_mask")


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """One sequence of T tokens; row t of every tensor belongs to token x[t].

    Attributes:
        states: [T, C] captured inputs, columns in spec order (C = K*H for points of the stream).
        target: [T, H] state at the spec's target point.
        token_ids: [T] int64, x[t].
        loss_mask: [T] bool; whether x[t] is a token the head should learn to predict.
        argmax: [T] int64; the target's greedy next token after row t over its full vocabulary.
    """

    states: Tensor
    target: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    argmax: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ShardTensors:
    """The tensors of one shard (see the module's table); ``target`` is None where an input is the target."""

    states: Tensor
    target: Tensor | None
    token_ids: Tensor
    loss_mask: Tensor
    argmax: Tensor
    starts: Tensor

    @classmethod
    def of(cls, sequences: Sequence[StoredSequence], *, target_is_input: bool = False) -> Self:
        """Lay whole sequences end to end."""
        lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
        return cls(
            states=torch.cat([s.states for s in sequences]),
            target=None if target_is_input else torch.cat([s.target for s in sequences]),
            token_ids=torch.cat([s.token_ids for s in sequences]),
            loss_mask=torch.cat([s.loss_mask for s in sequences]),
            argmax=torch.cat([s.argmax for s in sequences]),
            starts=lengths.cumsum(0),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self.starts.diff().tolist())

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are present, in the file's order."""
        for name in _ORDER:
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


def write_shard(path: Path, shard: ShardTensors) -> tuple[str, int]:
    """Write atomically; returns the file's SHA-256 and size in bytes.

    The same tensors give the same bytes (safetensors' own writer does not fix the order of its metadata).

    Raises:
        StoreError: the system refused; nothing is left behind.
    """
    header, at = {}, 0
    for name, tensor in shard.named():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, written = hashlib.sha256(), 0
    with replacing(path) as file:
        parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for part in parts + [_view(tensor) for _, tensor in shard.named()]:
            digest.update(part)
            written += file.write(part)
    return digest.hexdigest(), written


def map_shard(path: Path) -> ShardTensors:
    """The tensors of a shard as views into a private memory map: pages are read when they are used.

    Raises:
        StoreError: the file is missing, truncated, or not a shard.
    """
    try:
        # A tensor made in inference mode could never take part in training.
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := {"states", "token_ids", "loss_mask", "argmax", "starts"} - names:
                raise StoreError(f"{path} is not a shard of a dump: it has no tensor {sorted(missing)[0]!r}")
            tensors = {name: file.get_tensor(name) for name in _ORDER if name in names}
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the dump is damaged; make it again") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}); make the dump again") from None
    tensors.setdefault("target", None)
    return ShardTensors(**tensors)


def check_file(path: Path, size: int, sha256: str | None = None) -> None:
    """Whether a shard is there, of the recorded size, and (where given) of the recorded checksum.

    Raises:
        StoreError: it is not.
    """
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the dump is damaged; make it again") from None
    if found != size:
        raise StoreError(f"{path} is damaged: {found} bytes instead of {size}; make the dump again")
    if sha256 is not None and (digest := _digest(path)) != sha256:
        raise StoreError(
            f"{path} is damaged: its checksum is {digest[:12]}..., the manifest says {sha256[:12]}...; "
            "make the dump again"
        )


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied (and without numpy, which torch does not require)."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(
            f"a shard is written from contiguous CPU tensors, not {tensor.stride()} on {tensor.device}"
        )
    if not tensor.numel():
        return memoryview(b"")
    array = ctypes.c_char * (tensor.numel() * tensor.element_size())
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")
