"""Rows as token ids with a mask of the tokens to learn, or as prompts to be answered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from ...errors import DataError
from .forms import Form, PlainText, TokenIds, form_of
from .images import ImageSettings, Media, RenderedImages, Vision, chat_template_of, image_source
from .records import Row, RowError
from .rendering import Answer, Notes, Rendering
from .template import ChatTemplates, TemplateSettings
from .wire import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Turns = Literal["auto", "all", "each", "last"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sequence of T tokens.

    Attributes:
        ids: token ids.
        mask: tokens to learn; None for a prompt without an answer.
        place: of its row, and its turn where the row gives several sequences.
        prompt: how many of ``ids`` a server is sent for the last answer in it.
        media: its images, where it has any.
        asked: those of the prompt alone, where it is asked.
    """

    ids: list[int]
    mask: list[bool] | None
    place: str
    prompt: int
    media: Media | None = None
    asked: Media | None = None


@dataclass(slots=True)
class Counts:
    """What was met, for a summary.

    Attributes:
        forms: rows by form.
        unread: columns that are no part of a conversation, by name.
        whole, by_turn: conversations given as one sequence, and as one for each turn.
        nulls: rows in which a null may have been taken for padding.
        images: that conversations show.
        notes: see `Notes`.
    """

    forms: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    by_turn: int = 0
    nulls: int = 0
    images: int = 0
    notes: Notes = field(default_factory=Notes)


class _UnstableError(Exception):
    """Why the turns of a conversation cannot be learnt in one sequence."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A rendered conversation of text alone, as tokens; `RenderedImages` is one with images."""

    ids: list[int]
    text: str
    tokens: Callable[[str], list[int]]

    def edge(self, at: int) -> int | None:
        """How many tokens come before character ``at``; None where one lies across it."""
        before = self.tokens(self.text[:at])
        return len(before) if self.ids[: len(before)] == before else None


class RowEncoder:
    """Rows of any form, for one tokenizer.

    Args:
        tokenizer: needed for conversations and text.
        settings: of the chat template.
        turns: which assistant turns become sequences: ``all`` in one, ``each`` by itself, the ``last``;
            ``auto`` is all where the template does not rewrite earlier turns, else each.
        vocab_size: the target's; ids outside it are an error.
        images: needed for conversations with images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: TemplateSettings | None = None,
        turns: Turns = "auto",
        vocab_size: int | None = None,
        images: ImageSettings | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._images = images
        self._settings = settings or TemplateSettings()
        self._turns = turns
        self._vocab_size = vocab_size
        self._made: ChatTemplates | None = None
        self._made_vision: Vision | None = None
        self.counts = Counts()

    @property
    def template(self) -> str | None:
        """SHA-256 of the chat templates that were used; None where no row was a conversation."""
        return self._made.digest if self._made is not None else None

    @property
    def clock(self) -> str | None:
        """The time given to the templates; None where none of them reads the clock."""
        return self._made.clock if self._made is not None else None

    def sequences(self, row: Row) -> list[Encoded]:
        """What is learnt from a row: one sequence, or one for each turn.

        Raises:
            RowError: the row cannot be used.
        """
        form = self._form(row)
        if isinstance(form.content, Conversation):
            found = self._conversation(row.place, form.content)
        else:
            found = [self._plain(row.place, form.content)]
        for one in found:
            if one.mask is None:
                raise RowError(one.place, "no answer", "there are 'prompt_ids' but no 'answer_ids' to learn")
            if not any(one.mask) and one.ids:
                raise RowError(
                    one.place,
                    "nothing to learn",
                    "the loss mask selects no token, so there is nothing to learn",
                )
        return self._checked(found)

    def prompts(self, row: Row) -> list[Encoded]:
        """The prompts a server gets from a row: for its last answer or for each, or one without an answer.

        Raises:
            RowError: the row cannot be used.
        """
        form = self._form(row)
        if isinstance(form.content, Conversation):
            return self._checked(self._asked(row.place, form.content))
        plain = self._plain(row.place, form.content, prompt=True)
        if not plain.prompt:
            raise RowError(row.place, "an empty prompt", "the prompt is empty")
        return self._checked([plain])

    def _form(self, row: Row) -> Form:
        form = form_of(row)
        self.counts.forms[form.name] += 1
        self.counts.unread.update(form.unread)
        self.counts.nulls += form.nulls
        return form

    def _checked(self, found: list[Encoded]) -> list[Encoded]:
        for one in found:
            if not one.ids:
                raise RowError(one.place, "an empty sequence", "the sequence is empty")
            if self._vocab_size is not None and (bad := max(one.ids)) >= self._vocab_size:
                raise RowError(
                    one.place,
                    "a token outside the vocabulary",
                    f"token id {bad} is outside the model's vocabulary of {self._vocab_size}; "
                    "the data was made for another model or tokenizer",
                )
        return found

    def _plain(self, place: str, content: TokenIds | PlainText, *, prompt: bool = False) -> Encoded:
        if isinstance(content, TokenIds):
            mask = content.mask
            return Encoded(content.ids, mask, place, _before_last_run(mask, len(content.ids)))
        ids = self._tokens(content.text, special=True)
        return Encoded(ids, None if prompt else [True] * len(ids), place, len(ids) if prompt else 0)

    def _conversation(self, place: str, conversation: Conversation) -> list[Encoded]:
        rendering = self._rendering(place, conversation)
        turns = rendering.learnt_turns
        if not turns:
            raise RowError(place, "no assistant turn", _no_turn(conversation))
        if self._turns == "last":
            turns = turns[-1:]
        answers = [rendering.answer(turn) for turn in turns]
        if self._turns in ("auto", "all"):
            try:
                whole = self._in_one(place, rendering, answers)
                self.counts.whole += 1
                return [whole]
            except _UnstableError as why:
                if self._turns == "all":
                    raise RowError(
                        place,
                        "turns that cannot be learnt in one sequence",
                        f"{why}; learn each turn in a sequence of its own (--turns each)",
                    ) from None
        self.counts.by_turn += 1
        several = len(answers) > 1
        return [
            self._by_itself(f"{place} (turn {answer.turn})" if several else place, answer)
            for answer in answers
        ]

    def _asked(self, place: str, conversation: Conversation) -> list[Encoded]:
        rendering = self._rendering(place, conversation)
        if not rendering.ends_with_answer:
            read = self._read(place, rendering.prompt(), rendering.images())
            return [Encoded(read.ids, None, place, len(read.ids), asked=_media(read))]
        turns = rendering.learnt_turns
        if not turns:
            raise RowError(place, "no assistant turn", _no_turn(conversation))
        if self._turns in ("auto", "last"):
            turns = turns[-1:]
        several = len(turns) > 1
        found = []
        for turn in turns:
            where, answer = f"{place} (turn {turn})" if several else place, rendering.answer(turn)
            one = self._by_itself(where, answer)
            if images := rendering.images(turn):
                one = replace(one, asked=self._asked_images(where, one, answer, images))
            found.append(one)
        return found

    def _asked_images(self, place: str, one: Encoded, answer: Answer, images: tuple[str, ...]) -> Media:
        """The images of a prompt whose answer is known."""
        asked = self._read(place, answer.prompt, images)
        assert isinstance(asked, RenderedImages)
        if asked.ids != one.ids[: one.prompt]:
            raise RowError(
                place,
                "a prompt that its answer changes",
                f"the prompt of turn {answer.turn} alone has other tokens than before its answer",
            )
        return asked.media

    def _in_one(self, place: str, rendering: Rendering, answers: list[Answer]) -> Encoded:
        """All answers in the rendering of the whole conversation.

        Raises:
            _UnstableError: a prompt or an answer does not stand at the whole's beginning, or not in tokens.
        """
        whole = rendering.whole
        for answer in answers:
            if not whole.startswith(answer.text):
                raise _UnstableError(
                    "the chat template rewrites earlier turns: the conversation up to assistant turn "
                    f"{answer.turn} is not a prefix of the whole ({_parting(whole, answer.text)})"
                )
        read = self._read(place, whole, rendering.images())
        mask = [False] * len(read.ids)
        for answer in answers:
            self._edge(whole, read, answer.start, answer.turn)
            for first, last in answer.learnt:
                start = self._edge(whole, read, first, answer.turn)
                end = self._edge(whole, read, last, answer.turn)
                mask[start:end] = [True] * (end - start)
        mask = _without(read, mask)
        return Encoded(read.ids, mask, place, _before_last_run(mask, len(mask)), _media(read))

    def _edge(self, text: str, read: _Read | RenderedImages, at: int, turn: int) -> int:
        edge = read.edge(at)
        if edge is None:
            raise _UnstableError(
                f"a token of the whole conversation lies across an edge of assistant turn {turn} "
                f"(after {text[:at][-20:]!r})"
            )
        return edge

    def _read(self, place: str, text: str, images: tuple[str, ...]) -> _Read | RenderedImages:
        """A rendered conversation as tokens; by the processor where it shows images."""
        if not images:
            return _Read(self._tokens(text), text, self._tokens)
        assert self._images is not None
        found = [image_source(place, image, self._images.base) for image in images]
        return self._vision().read(place, text, found)

    def _by_itself(self, place: str, answer: Answer) -> Encoded:
        """A server's prompt and the target's answer: as when served, no token lies across the edge."""
        if answer.images:
            return self._by_itself_with_images(place, answer)
        prompt = self._tokens(answer.prompt)
        ids = self._tokens(answer.text)
        if ids[: len(prompt)] != prompt:
            ids = prompt + self._tokens(answer.text[answer.start :])
        mask = [False] * len(prompt) + [True] * (len(ids) - len(prompt))
        if answer.learnt != ((answer.start, len(answer.text)),):
            mask = [False] * len(ids)
            for first, last in answer.learnt:
                edges = []
                for at in (first, last):
                    before = prompt + self._tokens(answer.text[answer.start : at])
                    if ids[: len(before)] != before:
                        before = self._tokens(answer.text[:at])
                    if ids[: len(before)] != before:
                        raise RowError(
                            place,
                            "a token across a generation mark",
                            f"a token lies across an edge of a {{% generation %}} mark in turn {answer.turn} "
                            f"(after {answer.text[:at][-20:]!r})",
                        )
                    edges.append(len(before))
                mask[edges[0] : edges[1]] = [True] * (edges[1] - edges[0])
        return Encoded(ids, mask, place, len(prompt))

    def _by_itself_with_images(self, place: str, answer: Answer) -> Encoded:
        read = self._read(place, answer.text, answer.images)
        edges = [read.edge(at) for at in (answer.start, *(at for span in answer.learnt for at in span))]
        prompt, *spans = (edge for edge in edges if edge is not None)
        if len(spans) + 1 < len(edges):
            raise RowError(
                place,
                "a token across an edge of the answer",
                f"a token lies across an edge of what is learnt of turn {answer.turn}; strip the turn's "
                "leading or trailing white space",
            )
        mask = [False] * len(read.ids)
        for start, end in zip(spans[::2], spans[1::2], strict=True):
            mask[start:end] = [True] * (end - start)
        return Encoded(read.ids, _without(read, mask), place, prompt, _media(read))

    def _rendering(self, place: str, conversation: Conversation) -> Rendering:
        templates = self._templates()
        if conversation.images and self._images is None:
            raise RowError(
                place, "images", "images are not read here: this takes conversations of text alone"
            )
        self.counts.images += len(conversation.images)
        return Rendering(place, conversation, templates, self._special_spans, self.counts.notes)

    def _templates(self) -> ChatTemplates:
        if self._made is None:
            tokenizer = self._need("conversations")
            self._made = ChatTemplates(tokenizer, self._with_template(tokenizer))
            special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
            special |= {str(token) for token in tokenizer.all_special_tokens}
            by_length = sorted(special, key=len, reverse=True)
            self._specials = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        return self._made

    def _with_template(self, tokenizer: PreTrainedTokenizerBase) -> TemplateSettings:
        """The settings; with the processor's template where the tokenizer has none, as LLaVA's."""
        if self._images is None or self._settings.chat_template is not None or tokenizer.chat_template:
            return self._settings
        own = chat_template_of(self._images.processor())
        return self._settings if own is None else replace(self._settings, chat_template=own)

    def _vision(self) -> Vision:
        if self._made_vision is None:
            assert self._images is not None
            self._made_vision = Vision(self._images.processor())
        return self._made_vision

    def _special_spans(self, text: str) -> Iterator[tuple[int, int]]:
        return (found.span() for found in self._specials.finditer(text))

    def _tokens(self, text: str, *, special: bool = False) -> list[int]:
        tokenizer = self._need("text")
        ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
        bos = tokenizer.bos_token_id
        if (
            special
            and bos is not None
            and ids[:2] == [bos, bos]
            and text.startswith(str(tokenizer.bos_token))
        ):
            return ids[1:]  # the text has its own
        return ids

    def _need(self, what: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise DataError(f"{what} need a tokenizer, and none was given; give one, or give token ids")
        return self._tokenizer


def _without(read: _Read | RenderedImages, mask: list[bool]) -> list[bool]:
    """The mask without what stands for images, which an assistant's turn may hold too."""
    if isinstance(read, RenderedImages):
        return [bit and at not in read.of_images for at, bit in enumerate(mask)]
    return mask


def _media(read: _Read | RenderedImages) -> Media | None:
    return read.media if isinstance(read, RenderedImages) else None


def _before_last_run(mask: list[bool] | None, length: int) -> int:
    """Where the last run of tokens to learn begins; ``length`` where there is none."""
    if mask is None:
        return length
    end = length
    while end and not mask[end - 1]:
        end -= 1
    if end == 0:
        return length
    while end and mask[end - 1]:
        end -= 1
    return end


def _no_turn(conversation: Conversation) -> str:
    turns = [at for at, message in enumerate(conversation.messages) if message.is_assistant]
    if not turns:
        return "the conversation has no assistant turn, so there is nothing to learn"
    if turns == [0]:
        return (
            "the only assistant turn opens the conversation, and no server is asked without a message, "
            "so there is nothing to learn"
        )
    return "every assistant turn is marked as not to be learnt (weight 0, train false), so nothing is"


def _parting(whole: str, text: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(whole, text, strict=False)) if a != b), min(len(whole), len(text))
    )
    return f"{text[at : at + 20]!r} becomes {whole[at : at + 20]!r}"
