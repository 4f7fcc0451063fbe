"""Token ids as text: nothing lost, whole characters where there are some, and nothing left invisible."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from capture_hooks.store.data.pieces import Piece, TokenTexts, drawn, visible
from capture_hooks.testing import tiny

BYTES = tiny.tokenizer()
ANY = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


def sentencepiece():
    """As Llama 2's: ``▁`` for spaces, the first of which the decoder strips; bytes for what is not known."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "é", "▁h", "i", "▁hi"]
    backend = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[("▁h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


PIECES = sentencepiece()


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=30))
def test_texts_of_any_ids_join_to_what_the_tokenizer_decodes(ids):
    texts = TokenTexts(BYTES).texts(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == decoded(BYTES, ids)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["hi", " ", "é", "😀", "\n", "</s>", "x"]), max_size=12).map("".join))
def test_texts_join_where_the_first_space_is_stripped_and_bytes_stand_for_letters(text):
    ids = PIECES(text)["input_ids"]
    assert "".join(TokenTexts(PIECES).texts(ids)) == decoded(PIECES, ids)


@settings(max_examples=60, deadline=None)
@given(text=ANY, data=st.data())
def test_pieces_hold_every_byte_and_the_mask(text, data):
    ids = BYTES(text)["input_ids"]
    mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    pieces = TokenTexts(BYTES).pieces(ids, mask)
    assert b"".join(p.text.encode() if p.raw is None else p.raw for p in pieces) == text.encode()
    assert [p.learnt for p in pieces for _ in p.ids] == mask
    assert [i for p in pieces for i in p.ids] == ids
    assert [ids[p.start] for p in pieces] == [p.ids[0] for p in pieces]
    assert all(len(piece.text) == 1 for piece in pieces if piece.raw is None and not piece.special)


def test_a_character_of_several_tokens_is_one_piece_unless_the_mask_divides_it():
    ids = BYTES("a😀")["input_ids"]
    assert len(ids) == 5
    whole = TokenTexts(BYTES).pieces(ids, [True] * 5)
    assert [(p.start, len(p.ids), p.text) for p in whole] == [(0, 1, "a"), (1, 4, "😀")]
    assert TokenTexts(BYTES).texts(ids) == ["a", "", "", "", "😀"]
    divided = drawn(TokenTexts(BYTES).pieces(ids, [False, False, False, True, True]))
    assert [one.parts for one in divided] == [
        (("a", False),),
        (("<F0>", True),),
        (("<9F>", True),),
        (("<98>", True),),
        (("<80>", True),),
    ]


def test_a_letter_that_names_a_byte_elsewhere_is_a_letter():
    ids = PIECES.convert_tokens_to_ids(["▁hi", "é", "▁hi", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])
    pieces = TokenTexts(PIECES).pieces(ids, [True] * 7)
    assert [piece.text for piece in pieces] == ["hi", "é", " hi", "😀"]


def test_a_special_token_ends_an_unfinished_character():
    ids = [*BYTES("😀")["input_ids"][:2], BYTES.eos_token_id]
    last = TokenTexts(BYTES).pieces(ids, [True] * 3)[-1]
    assert (last.text, last.special) == ("<|im_end|>", True)


def test_the_replacement_character_itself_is_whole():
    assert [p.text for p in TokenTexts(BYTES).pieces(BYTES("\ufffdé")["input_ids"], [True] * 5)] == [
        "\ufffd",
        "é",
    ]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\u200bb", "a[U+200B]b"),  # zero width space
        ("a\u00adb", "a[U+00AD]b"),  # soft hyphen
        ("\ufeffa", "[U+FEFF]a"),  # byte order mark
        ("a\u00a0b", "a[U+00A0]b"),  # non-breaking space
        ("a\u3000b", "a[U+3000]b"),  # ideographic space
        ("a\u202eb", "a[U+202E]b"),  # right to left from here
        ("❤\ufe0f", "❤[U+FE0F]"),  # variation selector
        ("a\u3164b", "a[U+3164]b"),  # a letter without ink
        ("a\u2800b", "a[U+2800]b"),  # a braille cell without dots
        ("a\U000e0041", "a[U+E0041]"),  # a tag
        ("\x1b[31m", "[U+001B][31m"),  # a terminal would take it for a command
        ("a\tb", "a⇥b"),
        ("a\r\nb", "a[U+000D]↵\nb"),
        ("a b", "a b"),
        ("a  b", "a··b"),
        ("a \nb", "a·↵\nb"),
        (" a ", "·a·"),
        ("e\u0301", "e\u0301"),  # an accent is seen
    ],
)
def test_what_is_invisible_is_shown(text, shown):
    assert "".join(part for part, _ in visible(text)) == shown


def test_edges_depend_on_what_stands_beside():
    assert "".join(part for part, _ in visible(" b", before="a")) == " b"
    assert "".join(part for part, _ in visible("a ", after="\n")) == "a·"


@settings(max_examples=200, deadline=None)
@given(ANY)
def test_everything_shown_can_be_seen_and_read_back(text):
    parts = list(visible(text))
    assert all(letter.isprintable() or letter == "\n" for part, _ in parts for letter in part)
    signs = {"↵\n": "\n", "⇥": "\t", "·": " "}
    back = "".join(
        part if not mark else signs.get(part) or chr(int(re.fullmatch(r"\[U\+(.*)\]", part)[1], 16))
        for part, mark in parts
    )
    assert back == text
    assert not any(unicodedata.category(letter) == "Cf" for part, _ in parts for letter in part)


def test_a_token_without_text_is_shown_by_its_id():
    ids = [*BYTES("a")["input_ids"], 300, *BYTES("b")["input_ids"]]  # the tokenizer has 259
    shown = drawn(TokenTexts(BYTES).pieces(ids, [True] * 3))
    assert [part for one in shown for part in one.parts] == [
        ("a", False),
        ("[token 300]", True),
        ("b", False),
    ]


def test_the_tokens_of_an_image_are_drawn_once():
    image = [Piece(at, (9,), "<image>", False, True) for at in range(256)]
    shown = list(drawn([*image, Piece(256, (8,), "hi", False, False)]))
    assert [(one.piece.start, one.times) for one in shown] == [(0, 256), (256, 1)]
