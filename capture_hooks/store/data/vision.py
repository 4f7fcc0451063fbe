"""Conversations with images, by the target's own processor: token ids, loss mask, and the images' tensors.

A template writes one placeholder for an image; the processor puts a token there for each of its features.
The ids are those of ``processor.apply_chat_template(..., tokenize=True, return_dict=True)`` (transformers
5.24, ``processing_utils.py``).  Tokens that stand for an image are captured and never learnt: no model
writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from ...errors import DataError
from .images import ImageSource

if TYPE_CHECKING:
    from transformers import BatchFeature, ProcessorMixin

#: What the processor is asked for to place spans, and is no argument of the model.
_OFFSETS: Final = "text_replacement_offsets"

Spans = Sequence[tuple[int, int]]


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
        """SHA-256 over the images' bytes, in order."""
        return hashlib.sha256("".join(image.digest for image in self.images).encode()).hexdigest()

    def inputs(self) -> dict[str, Tensor]:
        """Everything the model's forward is given: ``input_ids`` [1, T], pixels, and what belongs to them.

        Raises:
            DataError: an image is gone, or is not the one that the data was read with.
        """
        inputs = self.vision.run(self.images[0].place, self.text, self.images)
        found = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        if found["input_ids"].shape != (1, self.tokens):
            raise DataError(
                f"{self.images[0].place}: {found['input_ids'].shape[-1]} tokens, which were {self.tokens} "
                "when the data was read; the processor's settings have changed since"
            )
        return found


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

    def encode(
        self, place: str, text: str, spans: Spans, images: Sequence[ImageSource]
    ) -> tuple[list[int], list[bool], Media]:
        """Token ids of a rendered conversation, which of them are learnt, and its images.

        Args:
            place: the record, for error messages.
            text: the conversation as its template writes it, with one placeholder per image.
            spans: character spans of ``text`` that the assistant wrote.
            images: one per placeholder, in order.

        Raises:
            DataError: placeholders and images do not match, an image cannot be read, or a token lies across
                the edge of a span.
        """
        inputs = self.run(place, text, images, **{f"return_{_OFFSETS}": True})
        ids: list[int] = inputs["input_ids"][0].tolist()
        told = inputs.get(_OFFSETS)
        if not told:
            raise DataError(
                f"{place}: {type(self._processor).__name__} does not tell where it put the images "
                f"({_OFFSETS}, transformers 5.19 and later), so the assistant's tokens cannot be told"
            )
        expanded, pieces = _expand(text, told[0])
        plain = self._tokens(expanded)
        lead = len(ids) - len(plain)  # what the tokenizer puts before a text, such as BOS
        if lead < 0 or ids[lead:] != plain:
            raise DataError(
                f"{place}: {type(self._processor).__name__} does not tokenize its text with the images' "
                "tokens in place as its tokenizer does, so the assistant's tokens cannot be told"
            )
        mask = [False] * len(ids)
        for span in spans:
            start, end = (self._edge(place, expanded, plain, _moved(at, told[0])) for at in span)
            mask[lead + start : lead + end] = [True] * (end - start)
        for at in self._of_images(expanded, pieces):
            mask[lead + at] = False
        return ids, mask, Media(tuple(images), text, len(ids), self)

    def run(self, place: str, text: str, images: Sequence[ImageSource], **options: Any) -> BatchFeature:
        """The processor's output for one conversation, as tensors.

        Raises:
            DataError: an image cannot be read, or the processor refuses.
        """
        bos = self._processor.tokenizer.bos_token
        if bos is not None and text.startswith(bos):
            options["add_special_tokens"] = False  # as apply_chat_template does
        opened = [image.open() for image in images]
        try:
            made: BatchFeature = self._processor(text=[text], images=[opened], return_tensors="pt", **options)
        except (ValueError, TypeError, IndexError, KeyError, StopIteration) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise DataError(
                f"{place}: {type(self._processor).__name__} refuses this conversation: {first}"
            ) from None
        return made

    def _tokens(self, text: str) -> list[int]:
        return list(self._processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _edge(self, place: str, text: str, ids: list[int], at: int) -> int:
        """How many tokens come before character ``at``."""
        before = self._tokens(text[:at])
        if ids[: len(before)] != before:
            raise DataError(
                f"{place}: a token lies across an edge of an assistant's turn (after {text[:at][-20:]!r}), "
                "so it is neither the template's nor the assistant's; strip the turn's leading or trailing "
                "white space"
            )
        return len(before)

    def _of_images(self, text: str, pieces: Spans) -> set[int]:
        """Tokens that stand for images, and the marks around them (``<|vision_start|>`` and its like)."""
        made = self._processor.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids, offsets = made["input_ids"], made["offset_mapping"]
        found = set()
        for start, end in pieces:
            inside = [at for at, (first, last) in enumerate(offsets) if first < end and last > start]
            found.update(inside)
            marks = (min(inside) - 1, max(inside) + 1)
            found.update(at for at in marks if 0 <= at < len(ids) and ids[at] in self._special)
        return found


def _expand(text: str, told: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
    """The text with every placeholder replaced, and where the replacements are in it."""
    parts, last = [], 0
    for piece in told:
        start, end = piece["span"]
        parts += [text[last:start], piece["replacement"]]
        last = end
    return "".join([*parts, text[last:]]), [tuple(piece["new_span"]) for piece in told]


def _moved(at: int, told: Sequence[Mapping[str, Any]]) -> int:
    """Where a character of the text is after the replacements."""
    grown = sum(len(piece["replacement"]) - len(piece["text"]) for piece in told if piece["span"][1] <= at)
    return at + grown
