"""Prompts to decode, from the same files that training reads, with or without their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import DataError
from ..store.data import BadRowPolicy, Media, Row, RowEncoder, TemplateSettings, Turns, read_rows
from ..store.data.encoding import Encoded
from ..store.data.examples import encoded_rows, row_encoder
from ..store.data.summary import BadRowCounter, Summary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and, where the data has one, a conversation that answers it.

    Attributes:
        token_ids: [N] the prompt.
        answered: [T] token ids of prompt and answer, or None.
        loss_mask: [T] bool, the answer's tokens in ``answered``, or None.
        source: where it came from.
        media: images that the prompt shows; answered_media: those of ``answered``.
    """

    token_ids: Tensor
    answered: Tensor | None = None
    loss_mask: Tensor | None = None
    source: str = ""
    media: Media | None = None
    answered_media: Media | None = None


class Prompts(list[Prompt]):
    """Prompts, and how the data they came from was read."""

    def __init__(self, prompts: Sequence[Prompt], summary: Summary) -> None:
        super().__init__(prompts)
        self.summary = summary


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    settings: TemplateSettings | None = None,
    *,
    tools: Sequence[Any] = (),
) -> list[int]:
    """Token ids of a conversation up to the point where the assistant is to answer.

    Args:
        tokenizer: with a chat template, unless ``settings`` gives one.
        messages: as a row's ``messages``.
        settings: of the chat template.
        tools: JSON schemas offered to the model.

    Raises:
        DataError: for a tokenizer without a chat template, or messages that the template refuses.
    """
    fields = {"messages": [dict(message) for message in messages], "tools": list(tools) or None}
    (prompt,) = RowEncoder(tokenizer, settings, "last").prompts(Row("the conversation", fields))
    return prompt.ids


def text_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text as it is, without a chat template."""
    (prompt,) = RowEncoder(tokenizer).prompts(Row("the prompt", {"text": text}))
    return prompt.ids


def read_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    vocab_size: int | None = None,
    limit: int | None = None,
    split: str | None = None,
    settings: TemplateSettings | None = None,
    turns: Turns = "last",
    bad_rows: BadRowPolicy = "error",
    processor: Callable[[], ProcessorMixin | None] | None = None,
) -> Prompts:
    """Read a file of prompts, rendered as `read_examples` renders what is learnt.

    A conversation is asked again at its last assistant turn, or at each; one that ends with the user is a
    prompt without an answer, as is a ``prompt`` (a user's message) or a plain ``text`` (taken as it is).

    Args:
        path: see `read_rows`.
        tokenizer: needed unless every record holds token ids.
        vocab_size: the target's; ids outside it are an error.
        limit: read only the first so many rows.
        split: which split of a `datasets` directory or data set.
        settings: of the chat template.
        turns: ``last`` or ``auto``: the last assistant turn; ``each`` or ``all``: every one that is learnt.
        bad_rows: refuse the data at the first row that cannot be used, or leave such rows out.
        processor: as for `read_examples`.

    Raises:
        DataError: for data that cannot be used; names file and line.
    """
    encoder = row_encoder(path, tokenizer, vocab_size, settings, turns, processor)
    bad = BadRowCounter()
    prompts: list[Prompt] = []
    rows = 0
    for row in islice(read_rows(path, split), limit):
        rows += 1
        prompts += [_prompt(one) for one in encoded_rows(encoder, row, bad, bad_rows, prompts=True)]
    if not prompts:
        why = f": none of its {rows} rows can be used; the first: {bad.first}" if bad.first else ""
        raise DataError(f"{path} holds no prompt{why}")
    return Prompts(prompts, Summary(rows, encoder.counts, bad.found()))


def _prompt(one: Encoded) -> Prompt:
    ids = torch.tensor(one.ids, dtype=torch.long)
    if one.mask is None or one.prompt == len(one.ids):
        return Prompt(ids, source=one.place, media=one.asked)
    mask = torch.tensor(one.mask)
    return Prompt(ids[: one.prompt], ids, mask, one.place, one.asked, one.media)
