"""Whether a model is still the one that answers were begun with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from ...target import load_whole_config, locate

#: Bytes read at both ends of a file.
_ENDS: Final = 1 << 16


def model_digest(model: str) -> str:
    """SHA-256 of a checkpoint's files, an adapter's too: of their names, sizes and ends.

    For a name on the hub, of its configuration, which says its revision.

    Raises:
        ModelError: there is no such model.
    """
    config = load_whole_config(model)
    location = locate(model)
    digest = hashlib.sha256()
    for place in (location.base, location.adapter):
        if place is None:
            continue
        if not Path(place).is_dir():
            digest.update(
                f"{place} {getattr(config, '_commit_hash', None)} {config.to_json_string()}".encode()
            )
            continue
        for path in sorted(file for file in Path(place).iterdir() if file.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                digest.update(file.read(_ENDS))
                file.seek(max(0, size - _ENDS))
                digest.update(file.read(_ENDS))
    return digest.hexdigest()
