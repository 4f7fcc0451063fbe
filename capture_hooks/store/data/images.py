"""Images in conversations: where their bytes are, and which bytes they were when the data was read.

A data set of images does not fit into memory as pixels.  What is kept of each is a path (or the encoded
bytes, where the record itself holds them) and a digest; it is decoded when its conversation is run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ...errors import DataError
from .rows import RowError

if TYPE_CHECKING:
    from PIL.Image import Image

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One image of a conversation.

    Attributes:
        place: the record that shows it, for error messages.
        path: its file; None where the record holds the encoded image itself.
        data: the encoded image where there is no file.
        digest: SHA-256 of the encoded bytes as they were read first.
    """

    place: str
    path: Path | None
    data: bytes | None = field(repr=False)
    digest: str

    def open(self) -> Image:
        """Decode it, upright and in RGB, as transformers' ``load_image`` does.

        Raises:
            RowError: it is gone, is no image, or is not the one that was read first.
            DataError: pillow is missing.
        """
        try:
            from PIL import Image
        except ModuleNotFoundError:
            raise DataError(
                f"{self.place}: reading images needs pillow: pip install 'capture-hooks[images]'"
            ) from None
        from transformers.image_utils import load_image

        data = self.data if self.data is not None else _read(self.place, self.path)
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise RowError(
                self.place,
                "an image that has changed",
                f"the image {self.path} has changed since the data was read; start again",
            )
        try:
            decoded: Image.Image = load_image(Image.open(io.BytesIO(data)))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            what = self.path if self.path is not None else "of a data URL"
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise RowError(
                self.place, "an image that cannot be decoded", f"the image {what} cannot be decoded: {first}"
            ) from None
        return decoded


def address(value: Any) -> Any:
    """What names an image, as text: a path or URL as it is, else a data URL of the encoded image.

    Args:
        value: a path or URL, OpenAI's ``{"url": ...}``, or what an image column of `datasets` holds: encoded
            bytes (``{"bytes": ..., "path": ...}``) or a decoded image.  Anything else is returned as it is.
    """
    if isinstance(value, Mapping) and "url" in value:
        return value["url"]
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        # With the bytes there, the path only says where they came from.
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    elif hasattr(value, "save") and hasattr(value, "getbands"):
        value = _encoded(value)
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    return value


def image_source(place: str, given: str, base: Path) -> ImageSource:
    """The image that a conversation names.

    Args:
        place: the record, for error messages.
        given: a path, or a ``file://`` or ``data:`` URL.
        base: the directory that relative paths start from: the data file's.

    Raises:
        RowError: it is not on this machine, or cannot be read.
    """
    if given[:5].lower() == "data:":
        data = _decoded(place, given)
        return ImageSource(place, None, data, hashlib.sha256(data).hexdigest())
    if given[:7].lower() == "file://":
        path = Path(unquote(re.sub(r"^localhost(?=/)", "", given[7:])))
    elif _SCHEME.match(given):
        raise RowError(
            place,
            "an image that is not on this machine",
            f"the image {_short(given)} is not on this machine, and reading data downloads nothing; save it "
            "and give its path",
        )
    else:
        path = Path(given)
    path = base / path
    return ImageSource(place, path, None, hashlib.sha256(_read(place, path)).hexdigest())


def _decoded(place: str, url: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise RowError(
            place,
            "a data URL that is not base64",
            f"a data URL of an image reads data:image/png;base64,..., not {_short(url)}",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise RowError(
            place, "a data URL that is not base64", f"the data URL {_short(url)} is not base64"
        ) from None


def _read(place: str, path: Path | None) -> bytes:
    assert path is not None
    try:
        if path.exists() and not path.is_file():
            raise RowError(place, "an image that cannot be read", f"the image {path} is not a file")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise RowError(
            place, "an image that cannot be read", f"cannot read the image {path}: {why}"
        ) from None


def _encoded(image: Any) -> bytes:
    """A decoded image without loss."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
