"""The header of a safetensors file, read without trusting it: bounded, and checked against the file's size.

The format (safetensors 0.4 to 0.8): 8 bytes, little endian, the header's length; the header, a JSON object
``{name: {dtype, shape, data_offsets}, "__metadata__": {text: text}}``; then the data, without gaps.

safetensors' own `safe_open` (0.8) is not enough for a file from anywhere: it reads headers of up to 100 MB,
takes the last of two tensors of one name without a word, and does not name the tensor that cannot be.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, Final, NoReturn

from ...errors import HeadError
from ...heads.files import TensorInfo
from ...io import check_regular

#: Longest header that is read.  A tensor takes some 100 bytes of it, and a head has some dozens.
LONGEST: Final = 1 << 20
#: Bits of one value.
_BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
}


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Shape and dtype of every tensor of a file; no more than `LONGEST` bytes are read.

    Raises:
        HeadError: missing, truncated, another format, or a header whose numbers cannot be.
    """
    check_regular(path, HeadError)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            start = file.read(8)
            if len(start) < 8:
                _refuse(path, f"it has {size} bytes, too few for a safetensors file")
            length = struct.unpack("<Q", start)[0]
            if length > min(LONGEST, size - 8):
                why = (
                    f"the file has {size} bytes: it is truncated, or no safetensors file"
                    if length > size - 8
                    else f"a draft head's stays under {LONGEST}"
                )
                _refuse(path, f"it declares a header of {length} bytes, and {why}")
            text = file.read(length)
    except FileNotFoundError:
        raise HeadError(f"{path} is missing: the head was copied or written in part") from None
    except OSError as error:
        raise HeadError(f"{path} cannot be read: {error}") from None
    entries = _parse(path, text)
    entries.pop("__metadata__", None)
    spans = [_span(path, name, entry) for name, entry in entries.items()]
    _check_layout(path, sorted(spans), size - 8 - length)
    return {name: TensorInfo(tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            _refuse(path, f"its header names {twice!r} twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is not JSON ({str(error) or type(error).__name__})")
    if not isinstance(header, dict):
        _refuse(path, f"its header is a JSON {type(header).__name__}, not an object")
    return header


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """First and last byte of a tensor's data, and its name."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"the header's entry of {name!r} is {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(path, f"{name!r} has the dtype {str(dtype)[:40]!r}, which safetensors does not know")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers):
            _refuse(path, f"{name!r} has the {what} {str(numbers)[:80]}")
    if len(offsets) != 2 or len(shape) > 8:
        _refuse(path, f"{name!r} has the shape {str(shape)[:80]} and the data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        _refuse(path, f"{name!r} is {dtype} {shape} and has {end - begin} bytes of data")
    return begin, end, name


def _check_layout(path: Path, spans: list[tuple[int, int, str]], room: int) -> None:
    """Tensors must fill the data part end to end, as every safetensors writer leaves it."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            _refuse(path, f"the data of {name!r} begins at byte {begin}, and byte {at} comes next")
        at = end
    if at != room:
        _refuse(path, f"its tensors end at byte {at} of {room} bytes of data: truncated, or not closed")


def _refuse(path: Path, why: str) -> NoReturn:
    raise HeadError(f"{path} is damaged or was made to look like a head: {why}")
