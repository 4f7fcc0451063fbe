"""Files that ``torch.save`` wrote, opened without trust: looked through first, then ``weights_only=True``.

Such a file is a zip of stored (not compressed) tensors and one small pickle that says how they belong
together.  That pickle is read opcode by opcode, which runs nothing, and may name tensors, their storages and
nothing else; only then is it loaded, with the tensors mapped into memory.
"""

from __future__ import annotations

import gzip
import io
import pickletools
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import StoreError
from ..io import check_regular

#: A dict of a few tensors takes under 2 KiB, of a head's some 10.
_PICKLE_BYTES: Final = 2**20
#: Random mantissas do not compress; anything beyond this many times its size is no file of tensors.
_INFLATION: Final = 20
_INFLATED_BYTES: Final = 64 * 2**20
_READ: Final = 2**20
_ALLOWED: Final = re.compile(
    r"torch\._utils _rebuild_(tensor_v[23]|parameter)|torch(\.storage)? \w+Storage|"
    r"torch (float8_\w+|uint\d+)|collections OrderedDict"
)


def strings_in(path: Path) -> frozenset[str]:
    """Every string in the file's pickle, its keys among them; nothing is loaded.

    Raises:
        StoreError: the file is damaged, or its pickle names more than tensors.
    """
    return _examine(path, _content(path))


def load(path: Path) -> dict[str, Any]:
    """The dict in a file; tensors on the CPU, mapped into memory unless the file is compressed.

    Raises:
        StoreError: the file is damaged, names more than tensors, unpacks to absurdly much, or is no dict.
    """
    content = _content(path)
    _examine(path, content)
    try:
        # A tensor made in inference mode could never take part in training.
        with torch.inference_mode(False):
            if isinstance(content, Path):
                found = torch.load(content, map_location="cpu", weights_only=True, mmap=True)
            else:
                found = torch.load(content, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever a malformed file makes torch raise
        raise StoreError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict):
        raise StoreError(f"{path} holds a {type(found).__name__}, not a dict of tensors")
    size = path.stat().st_size if isinstance(content, Path) else len(content.getbuffer())
    for name, value in found.items():
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > size:
                raise StoreError(
                    f"{path}: {name!r} claims {tuple(tensor.shape)} values, more than the file holds"
                )
    return found


def _content(path: Path) -> Path | io.BytesIO:
    check_regular(path)
    return _inflated(path) if path.suffix == ".gz" else path


def _inflated(path: Path) -> io.BytesIO:
    content = io.BytesIO()
    try:
        limit = max(_INFLATED_BYTES, _INFLATION * path.stat().st_size)
        with gzip.open(path) as file:
            while chunk := file.read(_READ):
                content.write(chunk)
                if content.tell() > limit:
                    raise StoreError(
                        f"{path} unpacks to more than {_INFLATION} times its size: numbers do not compress "
                        "like that"
                    )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    content.seek(0)
    return content


def _examine(path: Path, content: Path | io.BytesIO) -> frozenset[str]:
    """The strings of its pickle, once the zip and the pickle have been found harmless."""
    try:
        with zipfile.ZipFile(content) as archive:
            entries = archive.infolist()
            pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise StoreError(
                    f"{path} is a zip, but not one that torch.save writes: it has {len(pickles)} pickles, "
                    "or compressed entries"
                )
            if pickles[0].file_size > _PICKLE_BYTES:
                raise StoreError(
                    f"{path}: its pickle has {pickles[0].file_size} bytes; that of a few tensors has hundreds"
                )
            strings = _strings(path, archive.read(pickles[0]))
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever a malformed file makes these readers raise
        raise StoreError(
            f"{path} is damaged, or was not written by torch.save in torch 1.6 or newer ({error})"
        ) from None
    finally:
        if isinstance(content, io.BytesIO):
            content.seek(0)
    return strings


def _strings(path: Path, pickle: bytes) -> frozenset[str]:
    found = set()
    for opcode, argument, _ in pickletools.genops(pickle):
        if opcode.name == "GLOBAL" and isinstance(argument, str) and not _ALLOWED.fullmatch(argument):
            raise StoreError(
                f"{path} names {argument.replace(' ', '.')}: a file of tensors names nothing else, so "
                "it was not loaded"
            )
        if opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            raise StoreError(f"{path}: its pickle makes objects ({opcode.name}), so it was not loaded")
        if isinstance(argument, str) and "UNICODE" in opcode.name:
            found.add(argument)
    return frozenset(found)
