"""Which files of a directory hold a head's tensors: one file, whatever its name, or an index of several.

Pickles count on request, and only where there is no safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ...errors import HeadError
from ...heads.files import WEIGHTS, TensorInfo
from ...io import check_regular
from .contract import Stored
from .header import read_header
from .pickled import pickled_header

INDEX: Final = WEIGHTS + ".index.json"
#: What transformers called them before safetensors, and what SafeAILab's EAGLE heads are called.
PICKLE: Final = "pytorch_model.bin"
PICKLE_INDEX: Final = PICKLE + ".index.json"
_PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
#: Largest index that is read: a head has some dozens of tensors.
_LONGEST: Final = 1 << 22


def find_tensors(directory: Path, pickles: bool = False) -> dict[str, tuple[Stored, TensorInfo]]:
    """Every tensor of a head by the name it has on disk; headers alone are read.

    Args:
        directory: the head's.
        pickles: open files that ``torch.save`` wrote, where there are no others.

    Raises:
        HeadError: there is no file or no single choice of files, one is damaged, a shard or a tensor of the
            index is missing, or there are only pickles and nobody asked for them to be opened.
    """
    if (directory / INDEX).exists():
        if (directory / WEIGHTS).exists():
            raise HeadError(f"{directory} holds {WEIGHTS} and {INDEX}; only one of them can be the head's")
        return _sharded(directory / INDEX, ".safetensors", read_header)
    if (directory / WEIGHTS).exists():
        return _one_file(directory / WEIGHTS)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return _one_file(files[0])
    if files:
        listed = ", ".join(path.name for path in files[:4])
        raise HeadError(
            f"{directory} holds {len(files)} safetensors files ({listed}) and no {INDEX} that says which "
            "tensor lies where; a shard's index was not copied along"
        )
    if found := sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern)):
        if not pickles:
            raise HeadError(
                f"{directory} has no {WEIGHTS} but {', '.join(found[:3])}; pickles are opened only on "
                "request (--pickles), then with weights_only=True and after a look at what they name"
            )
        return _pickled(directory, found)
    raise HeadError(f"{directory} has no {WEIGHTS}: it is not a head, or was copied in part")


def _pickled(directory: Path, found: Sequence[str]) -> dict[str, tuple[Stored, TensorInfo]]:
    if (directory / PICKLE_INDEX).exists():
        return _sharded(directory / PICKLE_INDEX, ".bin", pickled_header)
    if PICKLE not in found and len(found) > 1:
        raise HeadError(
            f"{directory} holds {len(found)} pickles ({', '.join(found[:4])}) and no {PICKLE} that would be "
            "the head's; leave only that one there"
        )
    path = directory / (PICKLE if PICKLE in found else found[0])
    return {name: (Stored(path, name), info) for name, info in pickled_header(path).items()}


def _one_file(path: Path) -> dict[str, tuple[Stored, TensorInfo]]:
    return {name: (Stored(path, name), info) for name, info in read_header(path).items()}


def _sharded(
    path: Path, suffix: str, header: Callable[[Path], dict[str, TensorInfo]]
) -> dict[str, tuple[Stored, TensorInfo]]:
    """The tensors that an index names, in files of one kind beside it."""
    directory = path.parent
    weight_map = _weight_map(path)
    headers: dict[str, dict[str, TensorInfo]] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not shard.endswith(suffix):
            raise HeadError(f"{path} names {shard!r}; a shard is a {suffix[1:]} file in the same directory")
        if not (directory / shard).exists():
            raise HeadError(f"{path} names {shard}, which is missing: the head was copied in part")
        headers[shard] = header(directory / shard)
    if absent := sorted(name for name, shard in weight_map.items() if name not in headers[shard]):
        raise HeadError(f"{path} says that {absent[0]} lies in {weight_map[absent[0]]}, which lacks it")
    listed = {(shard, name) for name, shard in weight_map.items()}
    if extra := sorted({(s, n) for s, header in headers.items() for n in header} - listed):
        raise HeadError(f"{extra[0][0]} holds {extra[0][1]}, which {path} does not list there")
    return {
        name: (Stored(directory / shard, name), headers[shard][name]) for name, shard in weight_map.items()
    }


def _weight_map(path: Path) -> dict[str, str]:
    check_regular(path, HeadError)
    if path.stat().st_size > _LONGEST:
        raise HeadError(f"{path} has {path.stat().st_size} bytes; a head's index stays under {_LONGEST}")
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise HeadError(f"{path} is not JSON: {str(error) or type(error).__name__}") from None
    found = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise HeadError(f"{path} has no weight_map from tensors to files")
    return found
