"""``capture-hooks data preview``: what it shows is what is learnt, in the terminal, as JSON and as a page."""

import io
import json
import os
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import LlamaConfig
from typer.testing import CliRunner

from capture_hooks.cli.app import build
from capture_hooks.cli.data._preview_html import page
from capture_hooks.cli.data._preview_view import show
from capture_hooks.errors import CaptureHooksError, DataError, ModelError
from capture_hooks.store.data import RowEncoder, TemplateSettings, read_examples, read_rows
from capture_hooks.testing import tiny, tiny_vision
from capture_hooks.training.preview import pick, preview, why_not

TOKENIZER = tiny.tokenizer()
THINKING = tiny.tokenizer(
    "{% for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def talk(asked, answered):
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


def write(path, rows):
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def look(path, tokenizer=TOKENIZER, *, rows=3, row=None, max_length=None, vocab_size=tiny.VOCAB, **reading):
    settings = reading.get("settings", TemplateSettings())
    examples = read_examples(path, tokenizer, bad_rows="skip", vocab_size=vocab_size, **reading)
    return preview(
        examples,
        pick(examples, rows, row),
        tokenizer,
        settings,
        model="a target",
        vocab_size=vocab_size,
        max_length=max_length,
    )


def printed(found, *, width=100, colour=False, whole=False):
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        highlight=False,
        force_terminal=colour,
        color_system="truecolor" if colour else None,
    )
    show(found, console, whole=whole)
    return out.getvalue()


WORD = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=10).filter(
    lambda text: text.strip() and "<|" not in text and "qZ" not in text
)
ROW = st.one_of(
    st.builds(talk, WORD, WORD),
    st.builds(lambda text: {"text": text}, WORD),
    st.builds(
        lambda prompt, answer: {"prompt_ids": prompt, "answer_ids": answer},
        *[st.lists(st.integers(0, 258), min_size=1, max_size=6)] * 2,
    ),
    st.sampled_from(["{", "3", '{"messages": 3}', '{"text": "\\ud800"}', '{"prompt_ids": [1]}']),
)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=8), first=st.integers(1, 4), limit=st.integers(3, 40))
def test_the_json_is_what_read_examples_reads(tmp_path_factory, rows, first, limit):
    path = write(tmp_path_factory.mktemp("data") / "d.jsonl", [*rows, talk("hi", "ho")])
    examples = read_examples(path, TOKENIZER, bad_rows="skip")
    made = json.loads(json.dumps(look(path, rows=first, max_length=limit).to_json()))
    shown = made["shown"]
    expected = examples[:first]
    assert [(one["place"], one["token_ids"], one["mask"]) for one in shown] == [
        (e.source, e.token_ids.tolist(), e.loss_mask.tolist()) for e in expected
    ]
    assert ["".join(one["texts"]) for one in shown] == [TOKENIZER.decode(e.token_ids) for e in expected]
    assert [int(one["place"].rpartition(":")[2]) for one in shown] == [one["row"] for one in shown]

    figures = made["figures"]
    lengths = [len(example) for example in examples]
    learnt = Counter(int(t) for e in examples for t in e.token_ids[e.loss_mask])
    assert figures["rows"] == len(rows) + 1
    assert figures["left_out"] == len(rows) + 1 - len(examples)
    assert sum(bad["count"] for bad in made["bad"]) == figures["left_out"]
    assert (figures["sequences"], figures["tokens"]) == (len(examples), sum(lengths))
    assert (figures["learnt"], figures["distinct"]) == (learnt.total(), len(learnt))
    assert (figures["lengths"]["shortest"], figures["lengths"]["longest"]) == (min(lengths), max(lengths))
    for one in figures["lengths"]["bins"]:
        assert one["sequences"] == sum(one["first"] <= length <= one["last"] for length in lengths)
    assert sum(one["sequences"] for one in figures["lengths"]["bins"]) == len(examples)
    over = [e for e in examples if len(e) > limit]
    assert figures["too_long"] == {
        "max_length": limit,
        "sequences": len(over),
        "first": [e.source for e in over[:3]],
        "lost_by_cutting": sum(int(e.loss_mask[limit:].sum()) for e in over),
        "lost_by_skipping": sum(int(e.loss_mask.sum()) for e in over),
    }
    assert figures["coverage"] == [{"size": tiny.VOCAB, "share": 1.0, "default": True}]


def test_coverage_is_of_the_most_frequent_learnt_tokens(tmp_path):
    path = write(
        tmp_path / "d.jsonl",
        [{"prompt_ids": [5, 5], "answer_ids": [*range(n), *range(1500)]} for n in (700, 1000)],
    )
    found = look(path, None, vocab_size=2500)
    counts = Counter([*range(700), *range(1000), *range(1500), *range(1500)])
    ranked = [count for _, count in counts.most_common()]
    assert [(c.size, c.share, c.default) for c in found.figures.coverage] == [
        (1000, pytest.approx(sum(ranked[:1000]) / sum(ranked)), False),
        (2000, 1.0, False),
        (2500, 1.0, True),
    ]


def test_rows_are_chosen_by_number_and_by_place(tmp_path):
    path = write(tmp_path / "d.jsonl", [talk("a", "b"), "", "{", talk("c", "d")])
    examples = read_examples(path, TOKENIZER, bad_rows="skip")
    assert [e.source for e in pick(examples, 1, None)] == [f"{path}:1"]
    assert [e.source for e in pick(examples, 9, None)] == [f"{path}:1", f"{path}:4"]
    assert [e.source for e in pick(examples, 1, "3")] == [f"{path}:4"]  # the third row stands in line 4
    assert [e.source for e in pick(examples, 1, f"{path}:4")] == [f"{path}:4"]
    assert not pick(examples, 1, "2")

    def why(row):
        return str(why_not(row, read_rows(path), RowEncoder(TOKENIZER)))

    assert re.match(rf"{path}:3: malformed JSON", why("2"))
    assert re.match(rf"{path}:3: malformed JSON", why(f"{path}:3"))
    assert why("7") == f"there is no row '7': give a number from 1 to 3, or a place such as {path}:4"


def test_all_turns_of_a_row_are_shown(tmp_path):
    turns = [*talk("a", "b")["messages"], *talk("c", "d")["messages"]]
    path = write(tmp_path / "d.jsonl", [{"messages": turns}, talk("e", "f")])
    found = look(path, rows=1, turns="each")
    assert [one.place for one in found.shown] == [f"{path}:1 (turn 1)", f"{path}:1 (turn 3)"]
    assert len(look(path, row=f"{path}:1", turns="each").shown) == 2


def test_repeated_prompts_are_counted(tmp_path):
    rows = [talk("same", "a"), talk("same", "a"), talk("same", "b"), talk("other", "a")]
    figures = look(write(tmp_path / "d.jsonl", rows)).figures
    assert (figures.repeated_prompts, figures.repeated) == (2, 1)


TWO = [talk("a", "b"), talk("c", "d")]


@pytest.mark.parametrize(
    ("rows", "warning"),
    [
        (TWO, None),
        ([{"text": "abc"}, {"text": "defg"}], "all sequences end without an end-of-turn token"),
        ([*TWO, {"text": "abc"}], "1 of 3 sequences end without an end-of-turn token"),
        ([talk("a" * 900, "b"), talk("c" * 900, "d")], "only 0.2% of all tokens are learnt"),
        ([talk("a", "b"), talk("a", "c")], "train cannot hold out 5%: all 2 sequences have the same prompt"),
        ([*TWO, {"prompt_ids": [1], "answer_ids": [2]}], "1 of 3 sequences have nothing to learn beyond"),
        ([*TWO, {"prompt_ids": [259, 260], "answer_ids": [9, 2]}], "1 of 3 sequences hold ids that the tok"),
        ([*TWO, {"prompt_ids": [1, 1, 9], "answer_ids": [9, 2]}], "1 of 3 sequences begin with two <|im_st"),
    ],
)
def test_what_is_probably_not_meant_is_said(tmp_path, rows, warning):
    warnings = look(write(tmp_path / "d.jsonl", rows)).warnings
    assert [w[: len(warning)] for w in warnings] == [warning] if warning else not warnings


@pytest.mark.parametrize(
    ("answers", "arguments", "warning"),
    [
        (("<think>\nhm\n</think>\n\nyes", "<think>\nso\n</think>\n\nno"), {}, None),
        (("yes", "no"), {}, "all sequences learn an empty thought"),
        (("yes", "<think>\nso\n</think>\n\nno"), {}, "1 of 2 sequences learn an empty thought"),
        (("yes", "no"), {"enable_thinking": False}, "no thought is learnt"),
    ],
)
def test_thoughts_that_are_not_learnt_are_missed(tmp_path, answers, arguments, warning):
    path = write(tmp_path / "d.jsonl", [talk(f"a{n}", answer) for n, answer in enumerate(answers)])
    warnings = look(path, THINKING, settings=TemplateSettings(arguments=arguments)).warnings
    assert [w[: len(warning)] for w in warnings] == [warning] if warning else not warnings


ODD = talk("a\u00a0b\t", "x\u200by \r\n\u00ad😀 \ufeff")
DRAWN = "a[U+00A0]b⇥<|im_end|>↵\n<|im_start|>assistant↵\nx[U+200B]y·[U+000D]↵\n[U+00AD]😀 [U+FEFF]<|im_end|>"


@pytest.fixture
def odd(tmp_path):
    return look(write(tmp_path / "d.jsonl", [ODD, {"text": "[bold]no markup[/bold]"}, "{"]), max_length=40)


@pytest.mark.parametrize("width", [30, 80, 200])
def test_without_colours_brackets_stand_around_what_is_learnt(odd, width):
    text = printed(odd, width=width)
    assert "\x1b" not in text
    bracketed = DRAWN.replace("assistant↵\n", "assistant↵\n⟦") + "⟧↵\n"
    assert f"<|im_start|>user↵\n{bracketed}" in text  # whole at any width
    assert "⟦[bold]no markup[/bold]⟧" in text
    flat = " ".join(text.split())
    assert "1 longer than 40 tokens" in flat.replace("1longer", "1 longer")
    assert "malformed JSON" in flat


def test_with_colours_learnt_tokens_are_green(odd):
    text = printed(odd, colour=True)
    assert "⟦" not in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert DRAWN in plain
    green = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text, re.DOTALL))
    assert green == "xy😀 [bold]no markup[/bold]"  # invisible characters have signs, special tokens a colour
    assert "\x1b[1;35m<|im_end|>\x1b[0m" in text
    assert "\x1b[33m[U+200B]\x1b[0m" in text


def test_long_stretches_are_shortened_unless_one_row_is_chosen(tmp_path):
    path = write(tmp_path / "d.jsonl", [talk("q" * 3000, "a" * 3000)])
    short, whole = printed(look(path)), printed(look(path, row="1"), whole=True)
    assert short.count(" characters … ") == 2
    assert "q" * 3000 in whole
    assert "⟦" + "a" * 3000 + "<|im_end|>⟧" in whole
    assert "a<|im_end|>⟧" in short


class Page(HTMLParser):
    """Texts by the classes of the elements around them, and every attribute that could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.learnt, self.all, self.links, self.tags = [], "", "", [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag in ("span", "i", "pre"):
            self.open.append(dict(attributes).get("class") or tag)

    def handle_endtag(self, tag):
        if tag in ("span", "i", "pre"):
            self.open.pop()

    def handle_data(self, text):
        if "pre" in self.open:
            self.all += text
            self.learnt += text if any(" l" in name for name in self.open) else ""


def test_the_page_holds_the_same_and_loads_nothing(tmp_path):
    script = talk("<script>alert(1)</script>", "&amp; </pre>")
    found = look(write(tmp_path / "<i>.jsonl", [ODD, script]))
    text = page(found)
    parsed = Page()
    parsed.feed(text)
    assert "script" not in parsed.tags
    assert not parsed.links
    assert not re.search(r"url\(|@import", text)
    assert not parsed.open
    assert DRAWN in parsed.all
    assert "<script>alert(1)</script>" in parsed.all
    assert parsed.learnt == DRAWN.partition("assistant↵\n")[2] + "&amp; </pre><|im_end|>"
    assert "<i>.jsonl" not in text


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A target without weights: a preview needs none."""
    directory = tmp_path_factory.mktemp("model")
    LlamaConfig(vocab_size=tiny.VOCAB, max_position_embeddings=64).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def run(*arguments):
    result = CliRunner().invoke(build(), ["data", "preview", *map(str, arguments)])
    if isinstance(result.exception, CaptureHooksError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command(tmp_path, model):
    path = write(tmp_path / "d.jsonl", [talk("hi", "hello"), talk("q" * 90, "a"), "{", talk("c", "d")])
    out = tmp_path / "page.html"
    text = run(path, "--model", model, "--rows", "1", "--html", out)
    assert "⟦hello<|im_end|>⟧" in text
    assert "qqq" not in text
    assert "1 longer than 64 tokens" in text
    assert f"saved {out}" in text
    assert "row 1 " in out.read_text()
    made = json.loads(run(path, "--model", model, "--row", "2", "--max-length", "8", "--json"))
    assert [one["row"] for one in made["shown"]] == [2]
    assert made["figures"]["too_long"]["max_length"] == 8
    assert made["bad"][0]["first"] == [f"{path}:3"]


def test_rows_of_a_folder_have_places(tmp_path, model):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(TWO).save_to_disk(tmp_path / "folder")
    made = json.loads(run(tmp_path / "folder", "--model", model, "--row", f"{tmp_path}/folder[1]", "--json"))
    assert [(one["row"], one["place"]) for one in made["shown"]] == [(2, f"{tmp_path}/folder[1]")]


@pytest.mark.parametrize(
    ("rows", "more", "error", "message"),
    [
        (
            ["{", '{"text": 1}'],
            [],
            DataError,
            r"none of its 2 rows can be used \(1 x malformed JSON, 1 x not te",
        ),
        ([*TWO, "{"], ["--bad-rows", "error"], DataError, "d.jsonl:3: malformed JSON"),
        ([*TWO, "{"], ["--row", "3"], DataError, "d.jsonl:3: malformed JSON"),
        (TWO, ["--row", "d.jsonl:1"], DataError, "there is no row 'd.jsonl:1': give a number from 1 to 2"),
        (TWO, ["--max-length", "65"], DataError, "beyond the model's context of 64"),
        (TWO, ["--html", "."], DataError, r"--html \. is a directory"),
        (TWO, ["--html", "no/such/p.html"], DataError, "no/such is no directory"),
        (TWO, ["--html", "PIPE"], DataError, "PIPE is a directory or a device"),
        (TWO, ["--chat-template", "nope"], DataError, "nope"),
        (TWO, ["--model", "no/such"], ModelError, "no/such"),
    ],
)
def test_what_cannot_be_shown_is_one_error(tmp_path, model, rows, more, error, message):
    path = write(tmp_path / "d.jsonl", rows)
    page, pipe = tmp_path / "p.html", tmp_path / "PIPE"
    os.mkfifo(pipe)
    more = [str(pipe) if word == "PIPE" else word for word in more]
    with pytest.raises(error, match=message) as raised:
        run(path, "--model", model, "--html", page, *more)
    assert "\n" not in str(raised.value)
    assert not page.exists()
    assert pipe.is_fifo()


def test_the_data_is_not_replaced_by_the_page(tmp_path, model):
    path = write(tmp_path / "d.jsonl", TWO)
    before = path.read_bytes()
    with pytest.raises(DataError, match="is the data itself"):
        run(path, "--model", model, "--html", path)
    assert path.read_bytes() == before


def test_names_from_data_give_a_terminal_no_commands(tmp_path, model):
    path = write(tmp_path / os.fsdecode(b"\x1b[2J\xff[bold].jsonl"), [TWO[0] | {"\x1b[31m": 1}, TWO[1], "{"])
    text = run(path, "--model", model, "--html", tmp_path / "p.html")
    assert "\x1b" not in text
    assert text.count("[U+001B][2J[U+DCFF][bold].jsonl") >= 2
    assert "columns not read: [U+001B][31m (1)" in text
    assert "[U+001B][2J[U+DCFF][bold].jsonl" in (tmp_path / "p.html").read_text()


def test_the_tokens_of_an_image_are_shown_as_one(tmp_path):
    pytest.importorskip("PIL", reason="images need pillow")
    target = tmp_path / "target"
    tiny.model("llava").config.save_pretrained(target)
    tiny_vision.processor("llava").save_pretrained(target)
    tiny_vision.picture(0).save(tmp_path / "0.png")
    parts = [{"type": "image", "image": "0.png"}, {"type": "text", "text": "what?"}]
    asked, answer = {"role": "user", "content": parts}, {"role": "assistant", "content": "a cat"}
    gone = {"role": "user", "content": [{"type": "image", "image": "none.png"}]}
    tiny_vision.picture(1).save(tmp_path / "1.png")
    other = json.loads(json.dumps([asked, answer]).replace("0.png", "1.png"))
    rows = [{"messages": turns} for turns in ([asked, answer], [gone, answer], other, other)]
    path = write(tmp_path / "d.jsonl", rows)
    text = run(path, "--model", target)
    assert "3; prompts that came before: 1, with the same answer: 1" in text
    assert "<image>×4" in text
    assert "⟦a cat" in text
    with pytest.raises(DataError, match=r"d.jsonl:2: .*none\.png"):
        run(path, "--model", target, "--row", "2")


def test_token_ids_need_no_tokenizer(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt_ids": [3, 4], "answer_ids": [5, 6]}, {"prompt_ids": [7]}])
    found = look(path, None)
    assert found.shown[0].texts is None
    assert "3 4 ⟦5 6·⟧" in printed(found) or "3 4·⟦5 6·⟧" in printed(found)
