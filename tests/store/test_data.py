"""Reading conversations, text and token ids: exactly the assistant's tokens, and clear refusals."""

import gzip
import json

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.errors import DataError
from capture_hooks.store import read_examples
from capture_hooks.store.data import Row, RowEncoder, TemplateSettings
from capture_hooks.testing import tiny

TOKENIZER = tiny.tokenizer()
# The text of tiny.CHATML, with marks around what the assistant writes.
MARKED = tiny.tokenizer(
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello\nthere"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def learnt(example, tokenizer=TOKENIZER):
    """The masked-in tokens as text, one string for each run."""
    runs, run = [], []
    for token, wanted in zip(example.token_ids.tolist(), example.loss_mask.tolist(), strict=True):
        if wanted:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs + ([tokenizer.decode(run)] if run else [])


@pytest.mark.parametrize("tokenizer", [TOKENIZER, MARKED], ids=["prefixes", "marks"])
@pytest.mark.parametrize("form", ["messages", "conversations", "sharegpt"])
def test_assistant_turns_are_learnt_with_their_end(tmp_path, tokenizer, form):
    turns = TALK
    if form == "sharegpt":
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        turns = [{"from": names[t["role"]], "value": t["content"]} for t in TALK]
    path = write(tmp_path / "d.jsonl", {"messages" if form == "messages" else "conversations": turns})
    (example,) = read_examples(path, tokenizer)
    assert tokenizer.decode(example.token_ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert learnt(example) == ["hello\nthere<|im_end|>", "so long<|im_end|>"]
    assert example.source == f"{path}:1"


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(lambda text: "<|" not in text)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4))
def test_prefixes_and_marks_agree_on_every_conversation(pairs):
    messages = [
        {"role": role, "content": content}
        for pair in pairs
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    row = Row("x", {"messages": messages})
    (by_prefixes,) = RowEncoder(TOKENIZER).sequences(row)
    (by_marks,) = RowEncoder(MARKED).sequences(row)
    assert (by_prefixes.ids, by_prefixes.mask) == (by_marks.ids, by_marks.mask)
    ids, mask = by_prefixes.ids, by_prefixes.mask
    assert TOKENIZER.decode([t for t, m in zip(ids, mask, strict=True) if m]) == "".join(
        f"{answer}<|im_end|>" for _, answer in pairs
    )


FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_learnt_turn_by_turn(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": TALK[:3]}, {"messages": TALK})
    tokenizer = tiny.tokenizer(FORGETFUL)
    examples = read_examples(path, tokenizer)
    assert [example.source for example in examples] == [
        f"{path}:1",
        f"{path}:2 (turn 2)",
        f"{path}:2 (turn 4)",
    ]
    assert [example.conversation for example in examples] == [0, 1, 1]
    for example, end in zip(examples, (3, 3, 5), strict=True):
        prompt = tokenizer.apply_chat_template(TALK[: end - 1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(TALK[:end], tokenize=False)
        assert tokenizer.decode(example.token_ids) + "\n" * (end > 3 or example.conversation) == whole
        assert learnt(example) == [f"<think></think>{TALK[end - 1]['content']}<|im_end|>"]
        assert prompt + learnt(example)[0] + "\n" == whole
    summary = examples.summary
    assert (summary.rows, summary.counts.whole, summary.counts.by_turn) == (2, 1, 1)
    assert any("rewrites their earlier turns" in line for line in summary.lines())
    (last,) = read_examples(path, tokenizer, turns="last", limit=1)
    assert torch.equal(last.token_ids, examples[0].token_ids[: len(last)])
    with pytest.raises(DataError, match=rf"{path}:2: .*rewrites earlier turns.*--turns each"):
        read_examples(path, tokenizer, turns="all")


def test_a_token_across_the_edge_of_a_turn_is_split_as_a_server_splits_it(tmp_path):
    from tokenizers import AddedToken

    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([AddedToken("assistant\nhello", special=False, normalized=False)])
    path = write(tmp_path / "d.jsonl", {"messages": TALK[1:3]})
    with pytest.raises(DataError, match=rf"{path}:1: a token .* lies across an edge of assistant turn 1"):
        read_examples(path, tokenizer, turns="all")
    (example,) = read_examples(path, tokenizer)
    prompt = tokenizer.apply_chat_template(TALK[1:2], add_generation_prompt=True, return_dict=False)
    assert example.token_ids.tolist()[: len(prompt)] == prompt
    assert learnt(example, tokenizer) == ["hello\nthere<|im_end|>"]
    assert not example.loss_mask[: len(prompt)].any()


def test_a_template_may_be_given(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": TALK[1:3]})
    plain = tiny.tokenizer(None)
    (example,) = examples = read_examples(path, plain, settings=TemplateSettings(tiny.CHATML))
    assert learnt(example) == ["hello\nthere<|im_end|>"]
    assert examples.template == read_examples(path, TOKENIZER).template is not None


def test_text_is_learnt_whole(tmp_path):
    path = tmp_path / "d.txt"
    path.write_text("one line\n\nanother\n")
    first, second = read_examples(path, TOKENIZER)
    assert learnt(first) == ["one line"]
    assert second.source == f"{path}:3"
    (same,) = read_examples(write(tmp_path / "d.jsonl", {"text": "one line"}), TOKENIZER)
    assert same.token_ids.tolist() == first.token_ids.tolist()


def test_token_ids_are_taken_as_they_are(tmp_path):
    path = write(
        tmp_path / "d.jsonl",
        {"prompt_ids": [5, 6], "answer_ids": [7, 2]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]},
        {"input_ids": [5, 6], "loss_mask": [False, True]},
    )
    read = [(e.token_ids.tolist(), e.loss_mask.tolist()) for e in read_examples(path, vocab_size=8)]
    assert read == [
        ([5, 6, 7, 2], [False, False, True, True]),
        ([5, 6, 7], [False, True, False]),
        ([5, 6], [False, True]),
    ]


def test_gzip_arrays_and_datasets_read_alike(tmp_path):
    rows = [{"messages": TALK}, {"messages": TALK[1:3]}]
    plain = read_examples(write(tmp_path / "d.jsonl", *rows), TOKENIZER)
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write((tmp_path / "d.jsonl").read_text())
    (tmp_path / "d.json").write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(
        train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:1])
    ).save_to_disk(tmp_path / "splits")
    for name, split in (("d.jsonl.gz", None), ("d.json", None), ("saved", None), ("splits", "train")):
        read = read_examples(tmp_path / name, TOKENIZER, split=split)
        assert read.provenance().digest == plain.provenance().digest, name
    assert len(read_examples(tmp_path / "splits", TOKENIZER, split="test")) == 1
    with pytest.raises(DataError, match="several splits; choose one: test, train"):
        read_examples(tmp_path / "splits", TOKENIZER)
    with pytest.raises(DataError, match="no split 'dev': test, train"):
        read_examples(tmp_path / "splits", TOKENIZER, split="dev")


def test_the_digest_tells_tokens_masks_and_boundaries_apart(tmp_path):
    variants = [
        [([1, 2], [3])],
        [([1], [2, 3])],
        [([1, 2], [4])],
        [([1], [2]), ([3], [3])],
        [([3], [3]), ([1], [2])],
    ]
    digests = set()
    for number, rows in enumerate(variants):
        path = write(tmp_path / f"{number}.jsonl", *({"prompt_ids": p, "answer_ids": a} for p, a in rows))
        digests.add(read_examples(path).provenance().digest)
    assert len(digests) == len(variants)


@pytest.fixture
def long(tmp_path):
    return write(
        tmp_path / "d.jsonl",
        {"prompt_ids": [1, 2], "answer_ids": [3]},
        {"prompt_ids": [1], "answer_ids": [2, 3, 4, 5]},
        {"prompt_ids": [1] * 8, "answer_ids": [2]},
    )


def test_too_long_is_an_error_that_counts(long):
    with pytest.raises(DataError) as caught:
        read_examples(long, max_length=4)
    message = str(caught.value)
    assert "2 of 3 sequences are longer than 4 tokens" in message
    assert f"first {long}:2 (5 tokens), the longest {long}:3 (9)" in message


def test_too_long_can_be_cut_or_left_out(long):
    cut = read_examples(long, max_length=4, too_long="truncate")
    assert [len(e) for e in cut] == [3, 4]
    assert (cut.truncated, cut.skipped) == (1, 1)  # nothing to learn is left of the third
    left = read_examples(long, max_length=4, too_long="skip")
    assert [len(e) for e in left] == [3]
    assert (left.truncated, left.skipped) == (0, 2)
    assert len(read_examples(long, limit=2)) == 2
    with pytest.raises(DataError, match="empty data set: all 3 sequences are longer than 2"):
        read_examples(long, max_length=2, too_long="skip")


GOOD = '{"prompt_ids": [1], "answer_ids": [2]}\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is an empty data set"),
        ("\n\n", "is an empty data set"),
        (GOOD + '{"messages": [', "d.jsonl:2: malformed JSON"),
        ("[" * 100_000, "JSON that is nested too deep"),
        ("[1]\n" + GOOD, "d.jsonl:1: a record is a JSON object, not [1]"),
        (GOOD + "7\n", "d.jsonl:2: a record is a JSON object, not 7"),
        (GOOD + "{}\n", "d.jsonl:2: nothing to read in a record of [];"),
        ('{"input_ids": [1]}', "d.jsonl:1: nothing to read in a record of ['input_ids']"),
        (GOOD + '{"prompt_ids": [1], "answer_ids": [2, 999]}', "d.jsonl:2: token id 999 is outside"),
        ('{"prompt_ids": [1], "answer_ids": [-1]}', "d.jsonl:1: 'answer_ids'[0] is -1, not a token id"),
        ('{"prompt_ids": [true], "answer_ids": [1]}', "'prompt_ids'[0] is true, not a token id"),
        ('{"prompt_ids": [1.0], "answer_ids": [1]}', "'prompt_ids'[0] is 1.0, not a token id"),
        ('{"prompt_ids": "1 2", "answer_ids": [1]}', "'prompt_ids' is a list of token ids, not '1 2'"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "'loss_mask' has 1 entries for 2 'input_ids'"),
        ('{"input_ids": [1], "loss_mask": [2]}', "'loss_mask' is a list of 0 and 1"),
        ('{"input_ids": [1], "loss_mask": [0]}', "selects no token"),
        ('{"prompt_ids": [], "answer_ids": []}', "the sequence is empty"),
        ('{"messages": []}', "a conversation is a non-empty list of turns"),
        ('{"messages": [{"who": "me"}]}', "turn 0 has neither 'role' and 'content'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "has no assistant turn"),
        ('{"text": 5}', "'text' is a string"),
        (GOOD.encode() + b"\xff\xfe\n", "d.jsonl:2: not UTF-8 text"),
    ],
)
def test_bad_records_name_file_and_line(tmp_path, text, words):
    path = tmp_path / "d.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as caught:
        read_examples(path, TOKENIZER, vocab_size=300)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_is_reported_with_its_words(tmp_path):
    strict = "{{ raise_exception('roles must alternate') }}"
    path = write(tmp_path / "d.jsonl", {"messages": TALK})
    with pytest.raises(DataError, match=r"d.jsonl:1: the chat template refuses .*: roles must alternate"):
        read_examples(path, tiny.tokenizer(strict))


def test_conversations_without_a_template(tmp_path):
    path = write(tmp_path / "d.jsonl", {"messages": TALK})
    with pytest.raises(DataError, match="has no chat template, which conversations need"):
        read_examples(path, tiny.tokenizer(None))
    with pytest.raises(DataError, match="conversations need a tokenizer"):
        read_examples(path)


def test_unknown_files(tmp_path):
    with pytest.raises(DataError, match=r"does not exist; data is JSON lines"):
        read_examples(tmp_path / "nothing.jsonl")
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="damaged Parquet file after row 0"):
        read_examples(tmp_path / "d.parquet")
    (tmp_path / "d.csv").write_text("a,b")
    with pytest.raises(DataError, match="no known form of data"):
        read_examples(tmp_path / "d.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a directory, but `datasets` did not save it"):
        read_examples(tmp_path / "empty")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(GOOD.encode() * 100)[:-10])
    with pytest.raises(DataError, match="damaged gzip file"):
        read_examples(tmp_path / "d.jsonl.gz")
    (tmp_path / "e.jsonl.gz").write_text(GOOD)
    with pytest.raises(DataError, match="damaged gzip file"):
        read_examples(tmp_path / "e.jsonl.gz")


def test_a_directory_of_other_files_is_no_damaged_data_set(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(DataError, match=r"a directory without a data set in it: .*; data is JSON lines"):
        read_examples(tmp_path)
