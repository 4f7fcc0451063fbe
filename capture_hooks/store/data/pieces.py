"""Token ids as text that a person can read: whole characters, and what is invisible made visible."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens waited for where their bytes are not known: no character needs more.
_MOST: Final = 16
#: What Unicode says to draw nothing for (Default_Ignorable_Code_Point of DerivedCoreProperties.txt) beyond
#: the format characters, and letters and symbols that are blank.
_BLANK: Final = (
    (0x034F, 0x034F),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x2800, 0x2800),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFFA0, 0xFFA0),
    (0xE0100, 0xE01EF),
)
_SIGNS: Final = {"\n": "↵\n", "\t": "⇥"}


@dataclass(frozen=True, slots=True)
class Piece:
    """The fewest consecutive tokens that make whole characters and are learnt together, or not.

    Attributes:
        start: place of the first in the sequence.
        ids: their ids.
        text: what they add to the text; "" for a part of a character.
        learnt: whether they are learnt.
        special: whether it is a token of the template's or the tokenizer's own, such as ``<|im_end|>``.
        raw: the bytes of a part of a character, which has no text, where they are known; else None.
    """

    start: int
    ids: tuple[int, ...]
    text: str
    learnt: bool
    special: bool
    raw: bytes | None = None


class TokenTexts:
    """Token ids of one tokenizer as texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        #: Ids of the tokens that stand for themselves wherever they are, such as ``<|im_end|>``.
        self.special = special_ids(tokenizer)
        self._bytes: dict[int, bytes | None] = {}
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # Byte-level tokens are written with a letter for each byte, as GPT-2's.
        letters = bytes_to_unicode()  # type: ignore[no-untyped-call]  # transformers leaves it unannotated
        self._letters = {letter: byte for byte, letter in letters.items()}

    def texts(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to the text; "" where a later token completes its character."""
        found = [""] * len(ids)
        for _, stop, text in self._groups(ids):
            found[stop - 1] = text
        return found

    def pieces(self, ids: Sequence[int], mask: Sequence[bool]) -> list[Piece]:
        """A sequence in pieces; a character that only some of its tokens are learnt of is shown as bytes."""
        found = []
        for start, stop, text in self._groups(ids):
            inside = mask[start:stop]
            if all(inside) or not any(inside):
                special = stop == start + 1 and ids[start] in self.special
                found.append(Piece(start, tuple(ids[start:stop]), text, inside[0], special))
                continue
            found += [
                Piece(at, (ids[at],), "", mask[at], False, self._raw(ids[at])) for at in range(start, stop)
            ]
        return found

    def _groups(self, ids: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        """Ranges of tokens and the text that each adds.

        As servers do when they stream (vLLM 0.32, ``v1/engine/detokenizer.py``), a token is decoded behind
        the ones before it: a decoder may strip a space where a text begins.
        """
        before = start = 0
        for stop in range(1, len(ids) + 1):
            ends = stop == len(ids) or ids[stop] in self.special or ids[start] in self.special
            if not ends and not self._is_whole(ids[start:stop]):
                continue
            known = self._decode(ids[before:start])
            text = self._decode(ids[before:stop])
            added = text[len(known) :] if text.startswith(known) else self._decode(ids[start:stop])
            yield start, stop, added
            if added:
                before = start
            start = stop

    def _is_whole(self, ids: Sequence[int]) -> bool:
        raw = [self._raw(token) for token in ids]
        if all(part is not None for part in raw):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(b"".join(part or b"" for part in raw))
            return not decoder.getstate()[0]
        return len(ids) >= _MOST or not self._decode(ids).endswith("\N{REPLACEMENT CHARACTER}")

    def _raw(self, token: int) -> bytes | None:
        """The bytes that a token stands for; None where that cannot be told from its name."""
        if token not in self._bytes:
            raw = self._of_name(self._tokenizer.convert_ids_to_tokens(token))
            # The letter of a byte may as well be a letter: SentencePiece's "é" is no byte E9.
            same = raw is not None and self._decode([token]) == raw.decode("utf-8", "replace")
            self._bytes[token] = raw if same else None
        return self._bytes[token]

    def _of_name(self, name: Any) -> bytes | None:
        if isinstance(name, bytes):  # tokenizers on tiktoken
            return name
        if not isinstance(name, str):
            return None
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # SentencePiece's
            return bytes.fromhex(name[3:5])
        if all(letter in self._letters for letter in name):
            return bytes(self._letters[letter] for letter in name)
        return None

    def _decode(self, ids: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(decoded, str)
        return decoded


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of a tokenizer's special tokens."""
    marked = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(marked | set(tokenizer.all_special_ids))


def visible(text: str, before: str = "", after: str = "") -> Iterator[tuple[str, bool]]:
    """A text in parts, each with whether it stands for something that could not be seen.

    A line break is ``↵`` and the break itself, a tab ``⇥``, a space beside white space or at an edge ``·``,
    and every other character without ink its number: ``[U+200B]``.

    Args:
        text: to show.
        before: what stands before it; "" for an edge.
        after: what stands after it.
    """
    plain = ""
    padded = [before[-1:], *text, after[:1]]
    for last, (letter, following) in zip(padded, pairwise(padded[1:]), strict=False):
        sign = _sign(letter, last, following)
        if sign is None:
            plain += letter
            continue
        if plain:
            yield plain, False
        plain = ""
        yield sign, True
    if plain:
        yield plain, False


def printable(text: str) -> str:
    """A name from data as it may be printed: what a terminal would obey, or cannot show, by its number."""
    return "".join(letter if letter.isprintable() else _number(letter) for letter in text)


def _sign(letter: str, before: str, after: str) -> str | None:
    if letter == " ":
        return None if before.strip() and after.strip() else "·"
    if letter in _SIGNS:
        return _SIGNS[letter]
    ignored = any(first <= ord(letter) <= last for first, last in _BLANK)
    if ignored or unicodedata.category(letter) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"):
        return _number(letter)
    return None


def _number(letter: str) -> str:
    return f"[U+{ord(letter):04X}]"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A piece as it is shown.

    Attributes:
        piece: the first of ``times`` that are alike: an image is hundreds of one special token.
        times: see there.
        parts: its text in parts, each with whether it stands for something that could not be seen.
    """

    piece: Piece
    times: int
    parts: tuple[tuple[str, bool], ...]


def drawn(pieces: Sequence[Piece]) -> Iterator[Drawn]:
    """Pieces as they are shown; spaces are seen where what is learnt, or a special token, begins or ends."""
    for (_, special), group in groupby(pieces, lambda piece: (piece.learnt, piece.special)):
        run = list(group)
        if special:
            for _, alike in groupby(run, lambda piece: piece.text):
                same = list(alike)
                yield from (
                    Drawn(piece, times, tuple(visible(piece.text)))
                    for piece, times in ([(same[0], len(same))] if len(same) > 3 else [(p, 1) for p in same])
                )
            continue
        edges = ["", *(piece.text for piece in run), ""]
        for piece, before, after in zip(run, edges, edges[2:], strict=False):
            if piece.raw is not None:
                yield Drawn(piece, 1, (("".join(f"<{byte:02X}>" for byte in piece.raw), True),))
            elif not piece.text:
                yield Drawn(piece, 1, ((f"[token {' '.join(map(str, piece.ids))}]", True),))
            else:
                yield Drawn(piece, 1, tuple(visible(piece.text, before, after)))
