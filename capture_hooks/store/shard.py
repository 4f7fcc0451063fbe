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

A shard is never held as the bytes of a file: tensors are gathered, hashed and written a MiB at a time.
Hashing runs beside writing in a thread of its own, over the same few buffers while a cache still holds them.
The system is asked early to put on the disk what has been written, so that the flush at the end is short.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import StoreError
from ..io import check_regular, digest_of, replacing

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


#: A tensor, or several of two or more axes that lie side by side along the second.
Piece = Tensor | tuple[Tensor, ...]
#: A file's tensors by name, in its order, each as pieces that lie end to end along the first axis.
Columns = Mapping[str, Sequence[Piece]]

CODES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.bool: "BOOL",
}
#: Small enough for a core's cache: a gathered chunk is read again at once, to be written and hashed.
_CHUNK: Final = 2**20
#: Bytes of one write.  Linux 6.18 gives a larger one larger folios, which can cost it ten times the copy.
WRITE_BYTES: Final = 2**18
#: Bytes after which the system is asked to begin writing them.
_BEHIND: Final = 8 * 2**20
#: Chunks that may wait to be hashed; one more is being filled.
_WAITING: Final = 2


class NotFiniteError(ValueError):
    """A value that is NaN or infinite."""


class TensorStream:
    """Bytes and tensors, one after the other, into a file and into a hash.

    Args:
        file: where to write, from its beginning.
        update: fed every byte in order, from another thread; None for no hash.
        finite: look at every floating-point value.
    """

    def __init__(
        self, file: BinaryIO, update: Callable[[memoryview], None] | None = None, *, finite: bool = False
    ) -> None:
        self._file = file
        self._finite = finite
        self._at = self._begun = 0
        self._update = update
        self._thread = ThreadPoolExecutor(1, "hash") if update is not None else None
        self._hashing: deque[Future[None]] = deque()
        self._spare: list[Tensor] = []
        self._buffers = 1 if update is None else _WAITING + 1
        self._used = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait(0)
        if self._thread is not None:
            self._thread.shutdown()

    def put(self, data: bytes | Piece) -> int:
        """Append bytes, or values of CPU tensors in row-major order; returns how many bytes.

        Tensors that are not contiguous, or lie side by side, are gathered chunk by chunk.  One that is
        contiguous must not change before the stream is closed.

        Raises:
            NotFiniteError: a value that is NaN or infinite, where that is looked for.
        """
        if isinstance(data, bytes):
            return self._write(memoryview(data))
        if isinstance(data, Tensor) and data.is_contiguous():
            if data.is_floating_point():
                self._look(data)
            whole = view(data)
            return sum(self._write(whole[at : at + _CHUNK]) for at in range(0, len(whole), _CHUNK))
        if isinstance(data, Tensor):
            data = (data if data.ndim > 1 else data[:, None],)
        rows, *rest = shape_of(data)
        row = math.prod(rest) * data[0].element_size()
        step = max(1, _CHUNK // row)
        return sum(
            self._gather(tuple(block[at : at + step] for block in data), row) for at in range(0, rows, step)
        )

    def _gather(self, blocks: tuple[Tensor, ...], row: int) -> int:
        needed = len(blocks[0]) * row
        if not self._spare or self._spare[0].numel() < needed:
            self._wait(0)
            size = max(needed, _CHUNK)
            self._spare = [torch.empty(size, dtype=torch.uint8) for _ in range(self._buffers)]
        buffer = self._spare[self._used][:needed]
        self._used = (self._used + 1) % len(self._spare)
        gathered, at = buffer.view(blocks[0].dtype).view(shape_of(blocks)), 0
        for block in blocks:
            gathered[:, at : at + block.shape[1]] = block
            at += block.shape[1]
        self._look(gathered)
        return self._write(view(buffer))

    def _look(self, values: Tensor) -> None:
        if self._finite and not all_finite(values):
            raise NotFiniteError

    def _write(self, part: memoryview) -> int:
        if self._thread is not None and self._update is not None:
            self._hashing.append(self._thread.submit(self._update, part))
        for at in range(0, len(part), WRITE_BYTES):
            self._file.write(part[at : at + WRITE_BYTES])
        self._at += len(part)
        if self._at - self._begun >= _BEHIND:
            # The advice drops clean pages; these are dirty, so it only begins to write them.
            os.posix_fadvise(self._file.fileno(), self._begun, self._at - self._begun, os.POSIX_FADV_DONTNEED)
            self._begun = self._at
        self._wait(_WAITING)
        return len(part)

    def _wait(self, left: int) -> None:
        while len(self._hashing) > left:
            self._hashing.popleft().result()


def write_columns(stream: TensorStream, columns: Columns) -> int:
    """A whole safetensors file; returns its size in bytes."""
    header: dict[str, object] = {}
    at = 0
    for name, pieces in columns.items():
        first = pieces[0] if isinstance(pieces[0], Tensor) else pieces[0][0]
        shapes = [shape_of(piece) for piece in pieces]
        shape = [sum(rows for rows, *_ in shapes), *shapes[0][1:]]
        size = math.prod(shape) * first.element_size()
        header[name] = {"dtype": CODES[first.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    written = stream.put(len(text).to_bytes(8, "little") + text)
    return written + sum(stream.put(piece) for piece in _pieces(columns))


def _pieces(columns: Columns) -> Iterator[Piece]:
    for pieces in columns.values():
        yield from pieces


def shape_of(piece: Piece) -> list[int]:
    """Its shape as one tensor."""
    if isinstance(piece, Tensor):
        return list(piece.shape)
    rows, _, *rest = piece[0].shape
    return [rows, sum(block.shape[1] for block in piece), *rest]


def all_finite(values: Tensor) -> bool:
    """Whether every value is a number.  The extremes tell, much faster than looking at each: NaN is both."""
    return not values.numel() or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))


def view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied (and without numpy, which torch does not require)."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"only a contiguous CPU tensor is bytes, not {tensor.stride()} on {tensor.device}")
    if not tensor.numel():
        return memoryview(b"")
    array = ctypes.c_char * (tensor.numel() * tensor.element_size())
    return memoryview(array.from_address(tensor.data_ptr())).cast("B")
