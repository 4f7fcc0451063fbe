"""What people have (conversations, text, token ids) as token sequences with a loss mask."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor, nn

from ...errors import DataError
from ...target.states import placeholder_tokens
from ..manifest import Provenance
from .encoding import Encoded, RowEncoder, Turns
from .images import ImageSettings, Media
from .records import Row, RowError, read_rows
from .summary import BadRowCounter, Summary
from .template import TemplateSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

TooLong = Literal["error", "truncate", "skip"]
BadRowPolicy = Literal["error", "skip"]


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence: token ids [T] int64, loss mask [T] bool (tokens to learn), and where it came from.

    ``conversation`` numbers the row it came from: the turns of one conversation may be several sequences,
    which stay on one side of a split.
    ``media`` are its images, where it has any; the target is then run with them.
    """

    token_ids: Tensor
    loss_mask: Tensor
    source: str
    media: Media | None = None
    conversation: int | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def last_learnt(self) -> int:
        """The last position whose token is learnt."""
        return int(self.loss_mask.nonzero()[-1])


@dataclass(frozen=True, slots=True)
class Examples(Sequence[Example]):
    """A data set in memory, in the order of its source.

    Attributes:
        source: the path as it was given.
        items: the sequences.
        template: SHA-256 of the chat template, None where no record was a conversation.
        truncated: sequences cut to the greatest length.
        skipped: sequences left out as too long, or with nothing left to learn after the cut.
        clock: the moment that the chat template was told, in ISO form; None where it did not ask.
        summary: how the data was read.
    """

    source: str
    items: tuple[Example, ...]
    template: str | None = None
    truncated: int = 0
    skipped: int = 0
    clock: str | None = None
    summary: Summary = field(default_factory=Summary)

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
            conversations=self._conversations(),
            clock=self.clock,
        )

    def _conversations(self) -> tuple[int, ...] | None:
        """Sequences that each conversation gave; None where every sequence is one."""
        keys = (at if item.conversation is None else -1 - item.conversation for at, item in enumerate(self))
        counts = tuple(len(list(group)) for _, group in groupby(keys))
        return counts if len(counts) < len(self) else None


def read_examples(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    vocab_size: int | None = None,
    max_length: int | None = None,
    too_long: TooLong = "error",
    limit: int | None = None,
    split: str | None = None,
    settings: TemplateSettings | None = None,
    turns: Turns = "auto",
    bad_rows: BadRowPolicy = "error",
    processor: Callable[[], ProcessorMixin | None] | None = None,
) -> Examples:
    """Read a data set.

    What a row can be is said in `forms`; of a conversation every assistant turn is learnt, its end-of-turn
    token included, of text everything, of token ids what the mask says.

    Args:
        path: see `read_rows`.
        tokenizer: needed for conversations and text.
        vocab_size: the target's; ids outside it are an error.
        max_length: most tokens of a sequence, None for no limit.
        too_long: what to do with longer ones: refuse the data set, cut them, or leave them out.
        limit: read only the first so many rows.
        split: which split of a `datasets` directory or data set.
        settings: of the chat template.
        turns: how the turns of a conversation become sequences, see `RowEncoder`.
        bad_rows: refuse the data set at the first row that cannot be used, or leave such rows out.
        processor: gives the target's processor, where conversations may have images; called when one has.
            Images are paths (relative ones from the data's folder), ``file://`` or ``data:`` URLs, or images
            of a `datasets` column.  A conversation with images is not cut, but left out where it is too long.

    Raises:
        DataError: the data cannot be used; names file and line.
    """
    encoder = row_encoder(path, tokenizer, vocab_size, settings, turns, processor)
    bad = BadRowCounter()
    rows = 0
    kept: list[Example] = []
    over: list[Example] = []
    truncated = skipped = 0
    for row in islice(read_rows(path, split), limit):
        rows += 1
        for example in _examples(encoder, row, rows - 1, bad, bad_rows):
            if max_length is None or len(example) <= max_length:
                kept.append(example)
                continue
            over.append(example)
            cut = _cut(example, max_length)
            if too_long == "truncate" and example.media is None and bool(cut.loss_mask.any()):
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
        raise DataError(f"{path} is an empty data set: {_why_empty(skipped, max_length, bad)}")
    summary = Summary(rows, encoder.counts, bad.found())
    return Examples(str(path), tuple(kept), encoder.template, truncated, skipped, encoder.clock, summary)


def row_encoder(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int | None,
    settings: TemplateSettings | None,
    turns: Turns,
    processor: Callable[[], ProcessorMixin | None] | None,
) -> RowEncoder:
    """What `read_examples` encodes the rows of ``path`` with."""
    images = ImageSettings(processor, _folder(Path(path))) if processor is not None else None
    return RowEncoder(tokenizer, settings, turns, vocab_size, images)


def encoded_rows(
    encoder: RowEncoder,
    row: Row | RowError,
    bad: BadRowCounter,
    policy: BadRowPolicy,
    *,
    prompts: bool = False,
) -> list[Encoded]:
    """The sequences (or prompts) of one row; none where it cannot be used and is left out.

    Raises:
        RowError: it cannot be used, and ``policy`` is to stop there.
    """
    try:
        if isinstance(row, RowError):
            raise row
        return encoder.prompts(row) if prompts else encoder.sequences(row)
    except RowError as error:
        if policy == "error":
            raise
        bad.add(error)
        return []


def _examples(
    encoder: RowEncoder, row: Row | RowError, number: int, bad: BadRowCounter, policy: BadRowPolicy
) -> Iterator[Example]:
    for one in encoded_rows(encoder, row, bad, policy):
        assert one.mask is not None
        yield Example(torch.tensor(one.ids), torch.tensor(one.mask), one.place, one.media, number)


def _folder(path: Path) -> Path:
    """Where relative paths in the data start from."""
    return path if path.is_dir() else path.parent


def _cut(example: Example, length: int) -> Example:
    return replace(example, token_ids=example.token_ids[:length], loss_mask=example.loss_mask[:length])


def _why_empty(skipped: int, max_length: int | None, bad: BadRowCounter) -> str:
    if skipped:
        return f"all {skipped} sequences are longer than {max_length} tokens"
    if bad.first is not None:
        found = bad.found()
        reasons = ", ".join(f"{one.count:,} x {one.reason}" for one in found) if len(found) > 1 else ""
        listed = f" ({reasons})" if reasons else ""
        count = sum(one.count for one in found)
        return f"none of its {count:,} rows can be used{listed}; the first: {bad.first}"
    return "it holds no record"


def check_examples(examples: Sequence[Example], vocab_size: int, context: int | None) -> None:
    """Whether a model can read the data.

    Raises:
        DataError: a sequence longer than its context, or a token outside its vocabulary.
    """
    for example in examples:
        if context is not None and len(example) > context:
            raise DataError(
                f"{example.source}: {len(example)} tokens, but the model's context ends at {context}; "
                "truncate or skip such sequences (--too-long)"
            )
        least, most = int(example.token_ids.min()), int(example.token_ids.max())
        if least < 0 or most >= vocab_size:
            raise DataError(
                f"{example.source}: token ids from {least} to {most} do not fit the model's vocabulary of "
                f"{vocab_size}; the data was made for another model or tokenizer"
            )


def check_placeholders(examples: Sequence[Example], model: nn.Module) -> None:
    """Whether no token stands for an image (or video, or sound) that is not there.

    Raises:
        DataError: one does; the model would read it as a word.
    """
    standing = torch.tensor(sorted(placeholder_tokens(model)), dtype=torch.int64)
    for example in examples if len(standing) else ():
        found = example.token_ids[torch.isin(example.token_ids, standing)]
        if example.media is None and len(found):
            raise DataError(
                f"{example.source}: token {int(found[0])} stands for an image, video or sound, and there is "
                "none; images are parts of a message ({'type': 'image', ...}), token ids cannot hold them"
            )


def check_text_alone(examples: Sequence[Example], what: str) -> None:
    """Whether no sequence has images, which ``what`` would not be sent.

    Raises:
        DataError: some have; names the first.
    """
    seen = [example for example in examples if example.media is not None]
    if seen:
        raise DataError(
            f"{seen[0].source}: {len(seen)} of {len(examples)} sequences have images, which are not sent to "
            f"{what}; run the target in this process (--engine embedded)"
        )
