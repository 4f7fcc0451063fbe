"""Conversations with images: the images' bytes, and by the target's own processor their tokens and tensors.

A data set of images does not fit into memory as pixels.  What is kept of each is a path (or the encoded
bytes, where the record itself holds them) and a digest; it is decoded when its conversation is run.

A template writes one placeholder for an image; the processor puts a token there for each of its features.
The ids are those of ``processor.apply_chat_template(..., tokenize=True, return_dict=True)`` (transformers
5.24, ``processing_utils.py``).  Tokens that stand for an image are captured and never learnt: no model
writes them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from torch import Tensor

from ...errors import DataError
from .records import RowError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import BatchFeature, ProcessorMixin

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


#: What the processor is asked for to place spans, and is no argument of the model.
_OFFSETS: Final = "text_replacement_offsets"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What reading conversations with images needs.

    Attributes:
        processor: gives the target's processor, or None; called when an image is met first, or a conversation
            for which the tokenizer has no chat template.
        base: the directory that relative paths of images start from.
    """

    processor: Callable[[], ProcessorMixin | None]
    base: Path = Path()


@dataclass(frozen=True, slots=True)
class Media:
    """The images of one sequence.  Pixels are computed when they are asked for, and not kept.

    Attributes:
        images: in the order of their placeholders.
        text: the conversation as its template writes it, one placeholder per image.
        tokens: the sequence's length.
    """

    images: tuple[ImageSource, ...]
    text: str = field(repr=False)
    tokens: int
    vision: Vision = field(repr=False)

    @property
    def digest(self) -> str:
        """SHA-256 over the images' bytes, in order, and the settings they are made pixels with."""
        parts = (self.vision.digest, *(image.digest for image in self.images))
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def inputs(self) -> dict[str, Tensor]:
        """Everything the model's forward is given: ``input_ids`` [1, T], pixels, and what belongs to them.

        Raises:
            RowError: an image is gone, or is not the one that the data was read with.
        """
        inputs = self.vision.run(self.images[0].place, self.text, self.images)
        found = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if found["input_ids"].shape != (1, self.tokens):
            raise RowError(
                self.images[0].place,
                "a conversation that has changed",
                f"{found['input_ids'].shape[-1]} tokens, which were {self.tokens} when the data was read; "
                "the processor's settings have changed since",
            )
        return found


@dataclass(frozen=True, slots=True)
class RenderedImages:
    """A rendered conversation with its images, as T tokens.

    Attributes:
        ids: token ids.
        of_images: positions of tokens that stand for images and of the marks around them; never learnt.
        media: the images.
    """

    ids: list[int]
    of_images: frozenset[int]
    media: Media
    _text: str = field(repr=False)
    _lead: int = field(repr=False)
    _grown: tuple[tuple[int, int], ...] = field(repr=False)

    def edge(self, at: int) -> int | None:
        """How many tokens come before character ``at`` of `Media.text`; None where one lies across it."""
        moved = at + sum(by for end, by in self._grown if end <= at)
        before = self.media.vision.tokens(self._text[:moved])
        length = self._lead + len(before)
        return length if self.ids[self._lead : length] == before else None


class Vision:
    """A target's processor, as the tokenizer of conversations with images.

    Raises:
        DataError: it is no processor of text and images.
    """

    def __init__(self, processor: ProcessorMixin | None) -> None:
        if processor is None or not (
            hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")
        ):
            what = (
                "no processor"
                if processor is None
                else f"a {type(processor).__name__}, which takes no images"
            )
            raise DataError(
                f"the data has images, but the target has {what}; use a vision model's directory with its "
                "processor's files (processor_config.json, preprocessor_config.json)"
            )
        self._processor: Any = processor
        tokenizer = self._processor.tokenizer
        self._special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special -= {tokenizer.eos_token_id}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the image processor's settings."""
        settings = self._processor.image_processor.to_dict()
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()

    def read(self, place: str, text: str, images: Sequence[ImageSource]) -> RenderedImages:
        """A rendered conversation as tokens.

        Args:
            place: the record, for error messages.
            text: the conversation as its template writes it, with one placeholder per image.
            images: one per placeholder, in order.

        Raises:
            RowError: placeholders and images do not match, or an image cannot be read.
            DataError: the processor does not tell enough.
        """
        inputs = self.run(place, text, images, **{f"return_{_OFFSETS}": True})
        name = type(self._processor).__name__
        told = inputs.get(_OFFSETS)
        if not told:
            raise DataError(
                f"{name} does not tell where it puts images into a text ({_OFFSETS}), so the "
                "assistant's tokens cannot be told; a newer transformers may (5.24 does for most models)"
            )
        expanded = _expanded(text, told[0])
        ids: list[int] = inputs["input_ids"][0].tolist()
        plain = self.tokens(expanded)
        # A tokenizer may put its own tokens before and behind a text, such as BOS.
        leads = (at for at in range(len(ids) - len(plain) + 1) if ids[at : at + len(plain)] == plain)
        lead = next(leads, None)
        if lead is None:
            raise DataError(
                f"{place}: {name} does not tokenize its text with the images' tokens in place as its "
                "tokenizer does, so the assistant's tokens cannot be told"
            )
        return RenderedImages(
            ids,
            frozenset(lead + at for at in self._of_images(expanded, plain, told[0])),
            Media(tuple(images), text, len(ids), self),
            expanded,
            lead,
            tuple((piece["span"][1], len(piece["replacement"]) - len(piece["text"])) for piece in told[0]),
        )

    def run(self, place: str, text: str, images: Sequence[ImageSource], **options: Any) -> BatchFeature:
        """The processor's output for one conversation, as tensors.

        As ``apply_chat_template`` of a processor does, and that of a tokenizer does not, the tokenizer's own
        tokens are added where the text does not begin with BOS.

        Raises:
            RowError: an image cannot be read, or the processor refuses.
        """
        bos = self._processor.tokenizer.bos_token
        if bos is not None and text.startswith(bos):
            options["add_special_tokens"] = False
        opened = [image.open() for image in images]
        try:
            made: BatchFeature = self._processor(text=[text], images=[opened], return_tensors="pt", **options)
        except (ValueError, TypeError, IndexError, KeyError, StopIteration) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise RowError(
                place,
                "a conversation that the processor refuses",
                f"{type(self._processor).__name__} refuses this conversation: {first}",
            ) from None
        return made

    def tokens(self, text: str) -> list[int]:
        """Token ids of a text as it is."""
        return list(self._processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _of_images(self, text: str, ids: list[int], told: Sequence[Mapping[str, Any]]) -> set[int]:
        """Tokens that stand for images, and the marks around them (``<|vision_start|>`` and its like)."""
        found: set[int] = set()
        for first, last in (piece["new_span"] for piece in told):
            start, end = _common(ids, self.tokens(text[:first])), self.tokens(text[:last])
            # A token across the last edge stands for the image too.
            stop = _common(ids, end) + (ids[: len(end)] != end)
            found.update(range(start, stop))
            found.update(at for at in (start - 1, stop) if 0 <= at < len(ids) and ids[at] in self._special)
        return found


def chat_template_of(processor: ProcessorMixin | None) -> str | None:
    """A processor's own chat template; the one called ``default`` of several."""
    own: Any = getattr(processor, "chat_template", None)
    return own.get("default") if isinstance(own, Mapping) else own


def _expanded(text: str, told: Sequence[Mapping[str, Any]]) -> str:
    """The text with every placeholder replaced."""
    parts, last = [], 0
    for piece in told:
        start, end = piece["span"]
        parts += [text[last:start], piece["replacement"]]
        last = end
    return "".join([*parts, text[last:]])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
