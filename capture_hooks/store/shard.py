"""One shard: a safetensors file that holds whole sequences, end to end.

=============  ==================  ==========================================================
tensor         shape               row t
=============  ==================  ==========================================================
``states``     [N, C]              captured inputs at token t, columns in spec order
``target``     [N, H]              state at the spec's target point (absent where an input is it)
``token_ids``  [N] int64           token x[t]
``loss_mask``  [N] bool            whether x[t] is a token the head should learn to predict
``argmax``     [N] int64           the target's greedy next token after row t (absent where not captured)
``starts``     [S+1] int64         offsets of the sequences: 0 ... N
=============  ==================  ==========================================================
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import StoreError
from ..io import check_regular, digest_of, replacing
from .stream import Columns, TensorStream, write_columns

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
        argmax: [T] int64; the target's greedy next token after row t over its full vocabulary; None where
            it was not captured.
    """

    states: Tensor
    target: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    argmax: Tensor | None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ShardTensors:
    """The tensors of one shard (see the module's table).

    ``target`` is None where an input is the target, ``argmax`` where it was not captured.
    """

    states: Tensor
    target: Tensor | None
    token_ids: Tensor
    loss_mask: Tensor
    argmax: Tensor | None
    starts: Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(self.starts.diff().tolist())

    def columns(self) -> Columns:
        """The tensors that are present, in the file's order."""
        present = ((name, getattr(self, name)) for name in _ORDER)
        return {name: [tensor] for name, tensor in present if tensor is not None}


def columns_of(sequences: Sequence[StoredSequence], left_out: Collection[str] = ()) -> Columns:
    """Whole sequences end to end, nothing copied; the tensors named in ``left_out`` are not stored."""
    starts = torch.tensor([0, *(len(sequence) for sequence in sequences)]).cumsum(0)
    return {
        name: [starts] if name == "starts" else [getattr(sequence, name) for sequence in sequences]
        for name in _ORDER
        if name not in left_out
    }


def write_shard(path: Path, columns: Columns, *, finite: bool = False) -> tuple[str, int]:
    """Write atomically; returns the file's SHA-256 and size in bytes.

    The same rows give the same bytes (safetensors' own writer does not fix the order of its metadata).

    Raises:
        StoreError: the system refused; nothing is left behind.
        NotFiniteError: a state is NaN or infinite, where ``finite`` asks to look; nothing is left behind.
    """
    digest = hashlib.sha256()
    with replacing(path) as file, TensorStream(file, digest.update, finite=finite) as stream:
        size = write_columns(stream, columns)
    return digest.hexdigest(), size


def map_shard(path: Path) -> ShardTensors:
    """The tensors of a shard as views into a private memory map: pages are read when they are used.

    Raises:
        StoreError: the file is missing, truncated, or not a shard.
    """
    try:
        # A tensor made in inference mode could never take part in training.
        with torch.inference_mode(False), safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := {"states", "token_ids", "loss_mask", "starts"} - names:
                raise StoreError(f"{path} is not a shard of a dump: it has no tensor {sorted(missing)[0]!r}")
            tensors = {name: file.get_tensor(name) for name in _ORDER if name in names}
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the dump is damaged; make it again") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise StoreError(f"{path} is damaged ({error}); make the dump again") from None
    return ShardTensors(**{"target": None, "argmax": None} | tensors)


def check_file(path: Path, size: int, sha256: str | None = None) -> None:
    """Whether a shard is there, of the recorded size, and (where given) of the recorded checksum.

    Raises:
        StoreError: it is not.
    """
    check_regular(path)
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
        return digest_of(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
