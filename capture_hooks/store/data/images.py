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
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from ...errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DATA_URL = re.compile(r"data:[^,;]*(?:;[^,;]*)*;base64,", re.IGNORECASE)
#: Keys under which Hugging Face's ``{"type": "image"}`` parts say which image (`ProcessorMixin`).
_KEYS: Final = ("image", "path", "url", "base64")


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
            DataError: it is gone, is no image, or is not the one that was read first.
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
            raise DataError(
                f"{self.place}: the image {self.path} has changed since the data was read; start again"
            )
        try:
            decoded: Image.Image = load_image(Image.open(io.BytesIO(data)))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            what = self.path if self.path is not None else "of a data URL"
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(f"{self.place}: the image {what} cannot be decoded: {first}") from None
        return decoded


def image_of_part(place: str, part: Mapping[str, Any], base: Path) -> ImageSource:
    """The image that a content part shows.

    Args:
        place: the record, for error messages.
        part: ``{"type": "image_url", "image_url": {"url": ...}}`` as OpenAI writes it, or Hugging Face's
            ``{"type": "image"}`` with the image under ``image``, ``path``, ``url`` or ``base64``.
        base: the directory that relative paths start from: the data file's.

    Raises:
        DataError: the part names no image, one that is not on this machine, or one that cannot be read.
    """
    if part.get("type") == "image_url":
        value = part.get("image_url")
        value = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(value, str):
            raise DataError(f"{place}: an 'image_url' part has its address under image_url.url")
        return image_source(place, value, base)
    given = [key for key in _KEYS if part.get(key) is not None]
    if len(given) != 1:
        named = f"several ({', '.join(given)})" if given else "none"
        raise DataError(
            f"{place}: an 'image' part names one image under one of {', '.join(_KEYS)}; found {named}"
        )
    value = part[given[0]]
    if given[0] == "base64" and isinstance(value, str) and not value.startswith("data:"):
        value = f"data:;base64,{value}"
    return image_source(place, value, base)


def image_source(place: str, value: Any, base: Path) -> ImageSource:
    """An image from a path, a ``file://`` or ``data:`` URL, or what a `datasets` image column holds.

    Raises:
        DataError: as `image_of_part`.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        # An undecoded image column of `datasets`: with bytes, the path only says where they came from.
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    elif hasattr(value, "save") and hasattr(value, "getbands"):
        value = _encoded(value)
    if isinstance(value, bytes):
        return ImageSource(place, None, value, hashlib.sha256(value).hexdigest())
    if not isinstance(value, str) or not value:
        raise DataError(f"{place}: an image is a path or a data URL, not {str(value)[:40]!r}")
    if value[:5].lower() == "data:":
        return image_source(place, _decoded(place, value), base)
    if value[:7].lower() == "file://":
        path = Path(unquote(re.sub(r"^localhost(?=/)", "", value[7:])))
    elif _SCHEME.match(value):
        raise DataError(
            f"{place}: the image {_short(value)} is not on this machine, and reading data downloads nothing; "
            "save it and give its path"
        )
    else:
        path = Path(value)
    path = base / path
    return ImageSource(place, path, None, hashlib.sha256(_read(place, path)).hexdigest())


def _decoded(place: str, url: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise DataError(f"{place}: a data URL of an image reads data:image/png;base64,..., not {_short(url)}")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise DataError(f"{place}: the data URL {_short(url)} is not base64") from None


def _read(place: str, path: Path | None) -> bytes:
    assert path is not None
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{place}: the image {path} is not a file")
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{place}: cannot read the image {path}: {why}") from None


def _encoded(image: Any) -> bytes:
    """A decoded image without loss."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
