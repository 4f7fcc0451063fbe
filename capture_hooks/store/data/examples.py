"""What people have (conversations, text, token ids) as token sequences with a loss mask."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ...errors import DataError
from ..manifest import Provenance
from .chat import ChatEncoder, messages_of
from .records import Record, read_records
from .vision import Media

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TooLong = Literal["error", "truncate", "skip"]

RECORDS = (
    "a record has 'prompt_ids' and 'answer_ids', or 'input_ids' and 'loss_mask', or 'messages', "
    "or 'conversations', or 'text' (looked for in this order)"
)


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence: token ids [T] int64, loss mask [T] bool (tokens to learn), and where it came from.

    ``media`` are its images, where it has any; the target is then run with them.
    """

    token_ids: Tensor
    loss_mask: Tensor
    source: str
    media: Media | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Example]):
    """A data set in memory, in the order of its source.

    Attributes:
        source: the path as it was given.
        items: the sequences.
        template: SHA-256 of the chat template, None where no record was a conversation.
        truncated: sequences cut to the greatest length.
        skipped: sequences left out as too long, or with nothing left to learn after the cut.
    """

    source: str
    items: tuple[Example, ...]
    template: str | None = None
    truncated: int = 0
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self.items[index]

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(map(len, self.items))

    @property
    def learnt(self) -> int:
        """Tokens that the masks select."""
        return sum(int(item.loss_mask.sum()) for item in self.items)

    def provenance(self) -> Provenance:
        """What a manifest says about this data; the digest covers ids, masks and images, in order."""
        digest = hashlib.sha256()
        for item in self.items:
            ids, mask = item.token_ids.tolist(), item.loss_mask.tolist()
            digest.update(struct.pack(f"<q{len(ids)}q{len(mask)}?", len(ids), *ids, *mask))
            if item.media is not None:
                digest.update(item.media.digest.encode())
        return Provenance(
            source=self.source,
            digest=digest.hexdigest(),
            sequences=len(self),
            tokens=self.tokens,
            template=self.template,
        )


def read_examples(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    too_long: TooLong = "error",
    limit: int | None = None,
    chat_template: str | None = None,
    split: str | None = None,
) -> Examples:
    """Read a data set.

    ========================================  =====================================================
    record                                    tokens to learn
    ========================================  =====================================================
    ``prompt_ids``, ``answer_ids``            the answer's
    ``input_ids``, ``loss_mask``              as the mask says
    ``messages`` or ``conversations``         every assistant turn's, end-of-turn included
    ``text``, or a line of a .txt file        all
    ========================================  =====================================================

    Args:
        path: .jsonl, .json, .txt (each also .gz), or a directory that `datasets` saved.
        tokenizer: needed for conversations and text.
        vocab_size: the target's; ids outside it are an error.
        max_length: most tokens of a sequence, None for no limit.
        too_long: what to do with longer ones: refuse the data set, cut them, or leave them out.
        limit: read only the first so many records.
        chat_template: a Jinja template instead of the tokenizer's own.
        split: which split of a `datasets` directory.

    Raises:
        DataError: the data cannot be used; names file and line.
    """
    encoder = _RecordEncoder(tokenizer, chat_template, vocab_size)
    kept: list[Example] = []
    over: list[Example] = []
    truncated = skipped = 0
    for example in map(encoder.encode, islice(read_records(Path(path), split), limit)):
        if max_length is None or len(example) <= max_length:
            kept.append(example)
            continue
        over.append(example)
        cut = Example(example.token_ids[:max_length], example.loss_mask[:max_length], example.source)
        if too_long == "truncate" and bool(cut.loss_mask.any()):
            truncated += 1
            kept.append(cut)
        else:
            skipped += 1
    if over and too_long == "error":
        longest = max(over, key=len)
        raise DataError(
            f"{len(over)} of {len(kept) + len(over)} sequences are longer than {max_length} tokens: first "
            f"{over[0].source} ({len(over[0])} tokens), the longest {longest.source} ({len(longest)}); "
            "truncate or skip them (--too-long), or raise --max-length if the model reads that far"
        )
    if not kept:
        why = (
            f"all {skipped} sequences are longer than {max_length} tokens"
            if skipped
            else "it holds no record"
        )
        raise DataError(f"{path} is an empty data set: {why}")
    return Examples(str(path), tuple(kept), encoder.template, truncated, skipped)


class _RecordEncoder:
    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, template: str | None, vocab_size: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._given_template = template
        self._chat: ChatEncoder | None = None
        self._vocab_size = vocab_size

    @property
    def template(self) -> str | None:
        return self._chat.digest if self._chat is not None else None

    def encode(self, record: Record) -> Example:
        place, fields = record
        # A row of a `datasets` directory has every column; None means that it has not.
        fields = {name: value for name, value in fields.items() if value is not None}
        ids, mask = self._tokens(place, fields)
        if not ids:
            raise DataError(f"{place}: the sequence is empty")
        if not any(mask):
            raise DataError(f"{place}: the loss mask selects no token, so there is nothing to learn")
        if self._vocab_size is not None and (bad := max(ids)) >= self._vocab_size:
            raise DataError(
                f"{place}: token id {bad} is outside the model's vocabulary of {self._vocab_size}; "
                "the data was made for another model or tokenizer"
            )
        return Example(torch.tensor(ids), torch.tensor(mask), place)

    def _tokens(self, place: str, fields: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        if {"prompt_ids", "answer_ids"} <= fields.keys():
            prompt, answer = _ids(place, fields, "prompt_ids"), _ids(place, fields, "answer_ids")
            return prompt + answer, [False] * len(prompt) + [True] * len(answer)
        if {"input_ids", "loss_mask"} <= fields.keys():
            ids, mask = _ids(place, fields, "input_ids"), fields["loss_mask"]
            if not isinstance(mask, list) or not all(bit in (0, 1) for bit in mask):
                raise DataError(f"{place}: 'loss_mask' is a list of 0 and 1, or false and true")
            if len(mask) != len(ids):
                raise DataError(f"{place}: 'loss_mask' has {len(mask)} entries for {len(ids)} 'input_ids'")
            return ids, [bool(bit) for bit in mask]
        for name in ("messages", "conversations"):
            if name in fields:
                messages = messages_of(place, fields[name])
                return self._encoder().encode(place, messages, fields.get("tools"))
        if "text" in fields:
            return self._text(place, fields["text"])
        raise DataError(f"{place}: nothing to read in a record of {sorted(fields)}; {RECORDS}")

    def _text(self, place: str, text: Any) -> tuple[list[int], list[bool]]:
        if not isinstance(text, str):
            raise DataError(f"{place}: 'text' is a string, not {str(text)[:40]!r}")
        ids = list(self._need("text")(text, verbose=False)["input_ids"])
        return ids, [True] * len(ids)

    def _encoder(self) -> ChatEncoder:
        if self._chat is None:
            self._chat = ChatEncoder(self._need("conversations"), self._given_template)
        return self._chat

    def _need(self, what: str) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise DataError(f"{what} need a tokenizer, and none was given; give one, or give token ids")
        return self._tokenizer


def _ids(place: str, fields: Mapping[str, Any], name: str) -> list[int]:
    value = fields[name]
    if not isinstance(value, list):
        raise DataError(f"{place}: {name!r} is a list of token ids, not {str(value)[:40]!r}")
    for at, token in enumerate(value):
        if type(token) is not int or token < 0:
            raise DataError(f"{place}: {name!r}[{at}] is {token!r}, not a token id (an integer from 0)")
    return value
