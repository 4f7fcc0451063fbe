"""A look at a data set before it is trained on: how its rows are read and learnt, and its figures."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from ..errors import DataError, TrainingError
from ..store import Example, Examples
from ..store.data import Row, RowEncoder, RowError, TemplateSettings
from ..store.data.pieces import Piece, TokenTexts
from ..store.data.summary import BadRows
from .config import TrainConfig
from .data import MIN_TOKENS, LiveSequences
from .split import choose_draft_vocabulary, prompt_key, split_by_prompt, token_counts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Sizes of draft vocabularies to compare, beside the whole one.
SIZES: Final = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000)
#: A share of learnt tokens below this is warned about.
_LITTLE: Final = 0.05
_THOUGHT: Final = re.compile(
    r"(?:<think>|\[THINK\]|◁think▷|<\|channel\|>analysis<\|message\|>)"
    r"(.*?)(?:</think>|\[/THINK\]|◁/think▷|<\|end\|>|\Z)",
    re.DOTALL,
)
_THOUGHT_END: Final = re.compile(r"</think>|\[/THINK\]|◁/think▷")
_KNOWS_THOUGHTS: Final = re.compile(r"</?think>|\[/?THINK\]|◁/?think▷|reasoning_content|\|>analysis<\|")


@dataclass(frozen=True, slots=True)
class Shown:
    """One sequence of T tokens, to be looked at.

    Attributes:
        place: where it came from.
        row: number of its row, from 1.
        token_ids: T ids.
        texts: what each of them adds to the text, "" where a later one completes its character; None without
            a tokenizer.
        mask: whether each is learnt.
        pieces: the same for display.
    """

    place: str
    row: int
    token_ids: tuple[int, ...]
    texts: tuple[str, ...] | None
    mask: tuple[bool, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """Sequences of ``first`` to ``last`` tokens."""

    first: int
    last: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the sequences.

    Attributes:
        shortest, median, longest: of them.
        longest_place: where the longest came from.
        bins: all of them, by powers of two.
    """

    shortest: int
    median: float
    longest: int
    longest_place: str
    bins: tuple[Bin, ...]


@dataclass(frozen=True, slots=True)
class TooLongRows:
    """Sequences longer than ``max_length`` tokens; None where there is no limit.

    Attributes:
        max_length: the limit.
        sequences: how many are longer.
        first: places of the first of them.
        lost_by_cutting, lost_by_skipping: learnt tokens that are not learnt where they are cut, or left out.
    """

    max_length: int | None
    sequences: int
    first: tuple[str, ...]
    lost_by_cutting: int
    lost_by_skipping: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of the learnt tokens that the ``size`` most frequent cover; ``default`` is `train`'s choice."""

    size: int
    share: float
    default: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """A data set in numbers.

    Attributes:
        rows: that were read, those left out too.
        left_out: rows that cannot be used.
        sequences, tokens, learnt: of the rows that can; learnt tokens are those that the loss masks select.
        lengths, too_long, coverage: see there.
        repeated_prompts: sequences whose prompt came before.
        repeated: those of them that are the same sequence altogether.
        distinct: different tokens among the learnt ones.
    """

    rows: int
    left_out: int
    sequences: int
    tokens: int
    learnt: int
    lengths: Lengths
    too_long: TooLongRows
    repeated_prompts: int
    repeated: int
    distinct: int
    coverage: tuple[Coverage, ...]


@dataclass(frozen=True, slots=True)
class Preview:
    """What `preview` found.

    Attributes:
        source, model: as they were given.
        clock: the moment that the chat template was told; None where it did not ask.
        shown: the chosen sequences.
        figures: of all of them.
        bad: rows that cannot be used, by reason.
        notes: how the data was read.
        warnings: what is probably not meant.
    """

    source: str
    model: str
    clock: str | None
    shown: tuple[Shown, ...]
    figures: Figures
    bad: tuple[BadRows, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything but the pieces, which follow from the tokens."""
        made = asdict(self)
        for shown in made["shown"]:
            del shown["pieces"]
        return made


def preview(
    examples: Examples,
    chosen: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase | None,
    settings: TemplateSettings,
    *,
    model: str,
    vocab_size: int,
    max_length: int | None,
) -> Preview:
    """What is in a data set.

    Args:
        examples: as `dump` and `train` read them, without a limit to their length.
        chosen: those to be shown, see `pick`.
        tokenizer: with which they were read; None where that were token ids.
        settings: of the chat template, with which they were read.
        model: the target's name, for the report.
        vocab_size: the target's.
        max_length: longer sequences are counted as too long; None for no limit.
    """
    token_texts = TokenTexts(tokenizer) if tokenizer is not None else None
    found = figures(examples, vocab_size, max_length)
    return Preview(
        examples.source,
        model,
        examples.clock,
        tuple(_shown(example, token_texts) for example in chosen),
        found,
        examples.summary.bad,
        tuple(examples.summary.notes()),
        tuple(_warnings(examples, found, tokenizer, token_texts, settings)),
    )


def pick(examples: Examples, rows: int, row: str | None) -> list[Example]:
    """The sequences of the first ``rows`` rows that can be used, or of one: a place, or a number from 1."""
    if row is None:
        wanted = set(list(dict.fromkeys(example.conversation for example in examples))[:rows])
        return [example for example in examples if example.conversation in wanted]
    if row.isdecimal():
        return [example for example in examples if example.conversation == int(row) - 1]
    return [e for e in examples if e.source == row or e.source.startswith(f"{row} (turn ")]


def why_not(row: str, rows: Iterable[Row | RowError], encoder: RowEncoder) -> DataError:
    """Why a row is not among the sequences that were read: it cannot be used, or is not there.

    Args:
        row: its place, or its number from 1.
        rows: those that were read.
        encoder: like the one that read them.
    """
    count, last = 0, ""
    for count, found in enumerate(rows, 1):
        last = found.place
        if row not in (last, str(count)):
            continue
        try:
            if isinstance(found, RowError):
                return found
            encoder.sequences(found)
        except RowError as error:
            return error
    return DataError(f"there is no row {row!r}: give a number from 1 to {count:,}, or a place such as {last}")


def _shown(example: Example, token_texts: TokenTexts | None) -> Shown:
    ids, mask = example.token_ids.tolist(), example.loss_mask.tolist()
    if token_texts is None:
        pieces = [Piece(at, (token,), f"{token} ", mask[at], False) for at, token in enumerate(ids)]
        texts = None
    else:
        pieces, texts = token_texts.pieces(ids, mask), tuple(token_texts.texts(ids))
    row = (example.conversation or 0) + 1
    return Shown(example.source, row, tuple(ids), texts, tuple(mask), tuple(pieces))


def figures(examples: Examples, vocab_size: int, max_length: int | None) -> Figures:
    """A data set in numbers.

    Args:
        examples: read without a limit to their length.
        vocab_size: the target's.
        max_length: longer sequences are counted as too long.
    """
    sequences = LiveSequences(examples)
    counts = token_counts(sequences, tuple(range(len(examples))), vocab_size)
    prompts = {(prompt_key(e.token_ids, e.loss_mask), e.media and e.media.digest) for e in examples}
    whole = {_key(example) for example in examples}
    return Figures(
        rows=examples.summary.rows,
        left_out=examples.summary.left_out,
        sequences=len(examples),
        tokens=examples.tokens,
        learnt=examples.learnt,
        lengths=_lengths(examples),
        too_long=_too_long(examples, max_length),
        repeated_prompts=len(examples) - len(prompts),
        repeated=len(examples) - len(whole),
        distinct=int((counts > 0).sum()),
        coverage=tuple(_coverage(counts)),
    )


def _key(example: Example) -> bytes:
    ids, mask = example.token_ids.numpy().tobytes(), example.loss_mask.numpy().tobytes()
    images = example.media.digest if example.media is not None else ""
    return hashlib.sha256(len(mask).to_bytes(8, "big") + mask + ids + images.encode()).digest()


def _lengths(examples: Examples) -> Lengths:
    lengths = [len(example) for example in examples]
    longest = max(examples, key=len)
    shortest = min(lengths)
    bins = []
    for power in range(shortest.bit_length() - 1, len(longest).bit_length()):
        first, last = 2**power, 2 ** (power + 1) - 1
        bins.append(Bin(first, last, sum(first <= length <= last for length in lengths)))
    return Lengths(shortest, median(lengths), len(longest), longest.source, tuple(bins))


def _too_long(examples: Examples, max_length: int | None) -> TooLongRows:
    longer = [e for e in examples if max_length is not None and len(e) > max_length]
    return TooLongRows(
        max_length,
        len(longer),
        tuple(example.source for example in longer[:3]),
        # Images are not cut: such a sequence is left out.
        sum(int(e.loss_mask[max_length if e.media is None else 0 :].sum()) for e in longer),
        sum(int(example.loss_mask.sum()) for example in longer),
    )


def _coverage(counts: Tensor) -> Iterator[Coverage]:
    for size in (*(size for size in SIZES if size < len(counts)), None):
        chosen = choose_draft_vocabulary(counts, size)
        yield Coverage(len(chosen.token_ids), chosen.coverage, size is None)


def _warnings(
    examples: Examples,
    found: Figures,
    tokenizer: PreTrainedTokenizerBase | None,
    token_texts: TokenTexts | None,
    settings: TemplateSettings,
) -> Iterator[str]:
    if token_texts is not None and tokenizer is not None:
        yield from _ends(examples, token_texts.special)
        yield from _thoughts(examples, tokenizer, settings)
        yield from _odd_tokens(examples, tokenizer)
    if found.learnt < _LITTLE * found.tokens:
        yield (
            f"only {found.learnt / found.tokens:.1%} of all tokens are learnt: the target runs over the "
            "others to learn nothing from them"
        )
    short = sum(not bool(example.loss_mask[MIN_TOKENS - 1 :].any()) for example in examples)
    if short:
        yield (
            f"{_of(short, examples)} have nothing to learn beyond their second token: train leaves them out"
        )
    share = TrainConfig(steps=1).held_out
    try:
        split_by_prompt(LiveSequences(examples), share)
    except TrainingError as error:
        yield f"train {error}"


def _ends(examples: Examples, special: frozenset[int]) -> Iterator[str]:
    open_ended = sum(int(example.token_ids[last]) not in special for example, last in _last_learnt(examples))
    if open_ended:
        yield (
            f"{_of(open_ended, examples)} end without an end-of-turn token (their last learnt token is no "
            "special one): the head does not learn there where an answer ends"
        )


def _last_learnt(examples: Examples) -> Iterator[tuple[Example, int]]:
    return ((example, int(example.loss_mask.nonzero()[-1])) for example in examples)


def _thoughts(
    examples: Examples, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings
) -> Iterator[str]:
    """Whether what a thinking model writes before it answers is learnt."""
    if examples.template is None or not any(
        _KNOWS_THOUGHTS.search(text) for text in _templates(tokenizer, settings)
    ):
        return
    learnt = empty = 0
    for example in examples:
        text = tokenizer.decode(example.token_ids[example.loss_mask], skip_special_tokens=False)
        assert isinstance(text, str)
        thoughts = [found[1].strip() for found in _THOUGHT.finditer(text)]
        if not thoughts and (end := _THOUGHT_END.search(text)):  # the prompt opened it
            thoughts = [text[: end.start()].strip()]
        learnt += any(thoughts)
        empty += bool(thoughts) and not all(thoughts)
    if empty:
        yield (
            f"{_of(empty, examples)} learn an empty thought, which the chat template put there: a target "
            "that thinks would have thought; let it answer again (capture-hooks data regenerate), or turn "
            "thinking off, in serving too (--template-arg enable_thinking=false, if the template reads it)"
        )
    elif not learnt:
        yield (
            "no thought is learnt, though the chat template has a place for them: if the target is to think "
            "when it is served, the head will have seen none"
        )


def _templates(tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> list[str]:
    own = tokenizer.chat_template or {}
    named = dict(own) if isinstance(own, dict) else {"default": own}
    given = settings.chat_template
    return list(named.values()) if given is None else [named.get(given, given)]


def _odd_tokens(examples: Examples, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    foreign = sum(int(example.token_ids.max()) >= len(tokenizer) for example in examples)
    if foreign:
        yield (
            f"{_of(foreign, examples)} hold ids that the tokenizer does not have (it has "
            f"{len(tokenizer):,}): they were made with another one"
        )
    begin, unknown = tokenizer.bos_token_id, tokenizer.unk_token_id
    twice = sum(example.token_ids[:2].tolist() == [begin, begin] for example in examples)
    if begin is not None and twice:
        yield f"{_of(twice, examples)} begin with two {tokenizer.bos_token} tokens: a server sends one"
    if unknown is not None and unknown not in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        met = sum(bool((example.token_ids[example.loss_mask] == unknown).any()) for example in examples)
        if met:
            yield f"{_of(met, examples)} learn {tokenizer.unk_token}: text that the tokenizer cannot read"


def _of(count: int, examples: Sequence[Example]) -> str:
    if count == len(examples):
        return "all sequences"
    return f"{count:,} of {len(examples):,} sequences"
