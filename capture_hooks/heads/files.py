"""Files of a head's directory: read with one clear line on damage, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import HeadError
from ..io import check_regular, digest_of, replacing_directory

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
#: In a folder of its own: servers load every safetensors file beside the config as weights.
WITNESS: Final = "capture/witness.safetensors"
#: Bytes of the longest config that is read.
_LONGEST: Final = 1 << 22
_OURS: Final = frozenset({CONFIG, WEIGHTS, WITNESS})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a file's header declares it."""

    shape: tuple[int, ...]
    dtype: str


def read_config(directory: Path) -> dict[str, Any]:
    """The head's ``config.json``.

    Raises:
        HeadError: no such directory or file, or no JSON object in it.
    """
    if not directory.is_dir():
        raise HeadError(f"{directory} is not a directory; a head is a directory with {CONFIG} and {WEIGHTS}")
    path = directory / CONFIG
    check_regular(path, HeadError)
    try:
        if (size := path.stat().st_size) > _LONGEST:
            raise HeadError(f"{path} has {size} bytes; a head's config stays under {_LONGEST}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HeadError(f"{directory} holds no {CONFIG}: it is not a head, or was copied in part") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HeadError(f"{path} cannot be read: {error}") from None
    try:
        document = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise HeadError(f"{path} holds text that is no Unicode (half of a surrogate pair)") from None
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path} is not JSON: {str(error) or 'it is nested too deep'}") from None
    if not isinstance(document, dict):
        raise HeadError(f"{path} holds a JSON {type(document).__name__}; a head's config is an object")
    return document


def read_header(path: Path) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Metadata and tensors' shapes of a safetensors file; its data is not read.

    Raises:
        HeadError: the file is missing, truncated or of another format.
    """
    with _reading(path), safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        infos = {name: TensorInfo(tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
        return dict(file.metadata() or {}), infos


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors (on the CPU) of a safetensors file.

    Raises:
        HeadError: the file is missing, truncated, of another format, or holds a NaN or infinity.
    """
    with _reading(path), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        metadata = dict(file.metadata() or {})
    check_finite(tensors, str(path))
    return metadata, tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one safetensors file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors refuses tensors that share memory; two names may stand for one weight.
    storages: set[int] = set()
    for name, tensor in plain.items():
        if tensor.untyped_storage().data_ptr() in storages:
            plain[name] = tensor.clone()
        storages.add(plain[name].untyped_storage().data_ptr())
    path.parent.mkdir(exist_ok=True)
    save_file(plain, path, metadata=dict(metadata))
    # safetensors 0.8 leaves files that their owner alone can read; a server often runs as someone else.
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_config(path: Path, document: Mapping[str, Any]) -> None:
    """Write one JSON file."""
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def infos_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorInfo]:
    """Tensors in memory as a header would declare them."""
    return {name: TensorInfo(tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}


def check_finite(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        HeadError: naming the tensor and how many of its values are not finite.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        finite = torch.isfinite(tensor if tensor.element_size() > 1 else tensor.float())  # none for float8
        if not finite.all():
            bad = int((~finite).sum())
            raise HeadError(f"{where}: {name} holds {bad} NaN or infinite values of {tensor.numel()}")


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    check_regular(path, HeadError)
    return digest_of(path)


def check_digest(path: Path, wanted: str) -> None:
    """Check that a file is the one that the capture section speaks of.

    Raises:
        HeadError: it was changed.
    """
    if (found := digest(path)) != wanted:
        raise HeadError(
            f"{path} was changed after the head was saved: its SHA-256 is {found[:16]}..., "
            f"and the capture section says {wanted[:16]}...; save the head again with save_head"
        )


@contextlib.contextmanager
def writing(directory: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary sibling of ``directory`` that takes its place once the block has ended well.

    Raises:
        HeadError: ``directory`` exists (without ``overwrite``) or holds other files than a head's;
            no permission, no space.
    """
    directory = Path(os.path.abspath(directory))
    try:
        with replacing_directory(directory, lambda: _check_replaceable(directory, overwrite)) as fresh:
            yield fresh
    except (OSError, SafetensorError) as error:
        raise HeadError(f"the head cannot be saved to {directory}: {error}") from error


def _check_replaceable(directory: Path, overwrite: bool) -> None:
    if not os.path.lexists(directory):
        return
    if not directory.is_dir():
        raise HeadError(f"{directory} exists and is no directory; choose another place for the head")
    files = (str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())
    # Four are enough to name: the directory may be a whole disk.
    if other := sorted(islice((name for name in files if name not in _OURS), 4)):
        raise HeadError(
            f"{directory} holds files that belong to no head ({', '.join(sorted(other)[:3])}"
            f"{', ...' if len(other) > 3 else ''}); move them, or choose another directory"
        )
    if not overwrite and any(os.path.lexists(directory / name) for name in _OURS):
        raise HeadError(f"{directory} already holds a head; pass overwrite=True, or choose another directory")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    check_regular(path, HeadError)
    try:
        yield
    except FileNotFoundError:
        raise HeadError(f"{path} is missing: the head was copied or written in part") from None
    except (OSError, SafetensorError) as error:
        raise HeadError(f"{path} is damaged, truncated or no safetensors file: {error}") from None
