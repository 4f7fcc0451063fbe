"""What ``capture-hooks explain`` prints unasked, and its page: short, true, and no fault hidden."""

import itertools
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from capture_hooks.cli._explain_html import page
from capture_hooks.cli._explain_view import SCREEN, show
from capture_hooks.cli.app import build
from capture_hooks.errors import CaptureHooksError
from capture_hooks.interop.explain import ExplainOptions, explain_head, explain_ids, summary
from capture_hooks.interop.explain.summary import slots
from capture_hooks.spec import CaptureSpec

DOCS = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
KIMI = ("--ids", "2,30,58", "--family", "deepseek_v2", "--layers", "61")
FED = (*KIMI, "--spec", "post.2, post.30, post.58")
MANY = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
#: Config values and tensors, each of which some check finds wrong or doubtful; None removes.
CONFIGS = [
    ("tie_word_embeddings", True),
    ("norm_before_residual", True),
    ("norm_output", True),
    ("fc_norm", True),
    ("hidden_act", "gelu"),
    ("hidden_size", "8"),
    ("rms_norm_eps", None),
    ("architectures", ["Acme " * 40]),
    ("model_type", "deepseek_v3"),
    ("target_hidden_size", 12),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
    ("layer_types", ["sliding_attention"] * 3),
    ("eagle_aux_hidden_state_layer_ids", list(range(200))),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [9, 5, 5, -1, "x" * 300]}),
    ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [3, 1]}),
    ("num_hidden_layers", 3),
]
TENSORS = [
    ("d2t", torch.zeros(9).long()),
    ("d2t", None),
    ("lm_head.weight", None),
    ("embed_tokens.weight", torch.ones(3, 6)),
    ("fc.bias", torch.ones(8)),
    ("fc.weight", torch.ones(8, 20)),
    ("midlayer.mlp.up_proj.bias", torch.ones(12)),
    ("norm.weight", torch.ones(5)),
    *[(f"a_name_that_no_engine_knows_{k}.weight", torch.ones(2)) for k in range(4)],
]


@pytest.fixture
def broken(raw_head):
    """Writes a head that both engines serve, with the changes that are given; None removes."""
    numbers = itertools.count()

    def write(config=(), tensors=()):
        own = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]} | dict(config)
        nested = None if "eagle_config" in own else [1, 5, 8]
        return raw_head(nested=nested, config=own, tensors=tensors, name=f"head-{next(numbers)}")

    return write


def shown(report, engines=(), width=100, **options):
    with open(os.devnull, "w") as nowhere:
        console = Console(width=width, record=True, file=nowhere, highlight=False, **options)
        show(report, console, engines)
    return console.export_text(styles=bool(options))


def run(*words, **env):
    result = CliRunner().invoke(build(["explain"]), ["explain", *words], env={"COLUMNS": "100", **env})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        assert isinstance(result.exception, CaptureHooksError), result.exception
    return result.exit_code, result.output, str(result.exception)


def plain(text):
    return re.sub(r"\s", "", text)


@given(
    st.dictionaries(st.sampled_from([k for k, _ in CONFIGS]), st.integers(0, 1)),
    st.sets(st.integers(0, len(TENSORS) - 1)),
    st.sampled_from([None, "sglang", "vllm", "modelopt"]),
    st.booleans(),
)
@MANY
def test_a_head_with_any_faults_takes_a_screen_and_hides_none(broken, keys, tensors, writer, known):
    config = {key: [v for k, v in CONFIGS if k == key][-1 - which :][0] for key, which in keys.items()}
    target = {"family": "llama", "layers": 12} if known else {}
    head = broken(config, [TENSORS[k] for k in sorted(tensors)])
    try:
        report = explain_head(head, ExplainOptions(written_for=writer, **target))
    except CaptureHooksError:
        return
    text = shown(report)
    assert len(text.splitlines()) <= SCREEN
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    names = {"sglang", "vllm"}
    names |= {row.engine for row in report.rows if row.newest and row.library in names}
    before = plain(re.split(r"\n engine +feeds", text)[0])
    for finding in report.findings:
        if finding.severity == "wrong" and (not finding.engines or names & {*finding.engines}):
            said = plain(finding.what)[-40:] in before and plain(finding.do)[-40:] in before
            assert said or finding.check in before, finding


@given(
    st.lists(st.integers(-2, 400), min_size=1, max_size=200),
    st.sampled_from(["llama", "deepseek_v2", "gpt_oss"]),
    st.sampled_from(["post.2, post.30, post.58", "embed", ", ".join(f"post.{k}" for k in range(90)), None]),
)
@MANY
def test_any_ids_take_a_screen(ids, family, spec):
    asked = ExplainOptions(family=family, layers=99, spec=None if spec is None else CaptureSpec.parse(spec))
    report = explain_ids(ids, asked)
    text = shown(report)
    assert len(text.splitlines()) <= SCREEN
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert plain(summary(report).sentence) in plain(text)


@pytest.mark.parametrize("options", [{"color_system": None}, {"no_color": True, "force_terminal": True}])
def test_what_differs_is_marked_without_colours_too(options):
    asked = ExplainOptions(family="llama", layers=61, spec=CaptureSpec.parse("post.2, embed, post.58"))
    text = shown(explain_ids([2, 30, 58], asked), **options)
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert re.search(r"SGLang 0\.5\.23 +post\.2, post\.30\*, post\.58 +wrong", text)
    assert "* not what the head was trained on" in text


def test_what_differs_is_bold_in_a_terminal():
    asked = ExplainOptions(family="llama", layers=61, spec=CaptureSpec.parse("post.2, embed, post.58"))
    text = shown(explain_ids([2, 30, 58], asked), force_terminal=True, color_system="standard")
    assert re.search(r"\x1b\[1m[^\x1b]*post\.30\*", text)
    assert not re.search(r"\x1b\[1m[^\x1b]*post\.58", text)


def test_what_to_write_instead_is_there_and_history_is_not():
    code, short, _ = run(*FED)
    assert code == 0
    assert "write instead SGLang: eagle_config.eagle_aux_hidden_state_layer_ids = [3, 31, 59]" in short
    assert "write instead vLLM: eagle_aux_hidden_state_layer_ids = [3, 31, 59]" in short
    assert "0.5.12" not in short
    assert "torchspec" not in short
    _, whole, _ = run(*FED, "--all")
    assert "0.5.12" in whole
    assert "torchspec" in whole


def test_the_engines_that_are_asked_for_are_the_ones_that_are_shown():
    code, text, _ = run(*FED, "--engine", "modelopt", "--engine", "sglang==0.5.12")
    assert code == 0
    assert text.startswith("Right: given these ids, ModelOpt 0.47.0 and SGLang 0.5.12 will feed")
    assert "vLLM" not in text.partition("target")[0]


def test_control_characters_of_a_file_do_not_reach_the_terminal(broken):
    head = broken(
        {"architectures": ["A"], "hidden_act": "x", "extra": 1}, [("bad\x1b[2Jname", torch.ones(1))]
    )
    for more in ([], ["--all"]):
        _, text, _ = run(head, "--family", "llama", "--layers", "30", *more)
        assert "\x1b" not in text


class Page(HTMLParser):
    """Text, start tags, and the cells of the matrix."""

    def __init__(self, text):
        super().__init__()
        self.text, self.tags, self.cells, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "td" and "slot" in (dict(attributes).get("class") or "").split():
            self.cells.append([dict(attributes)["class"].split()[1:], ""])
            self.open.append("slot")
        elif tag in ("td", "th", "tr"):
            self.open.append("other")

    def handle_data(self, data):
        self.text.append(data)
        if self.open and self.open[-1] == "slot":
            self.cells[-1][1] += f"{data} "


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "nobody's"])
@pytest.mark.parametrize(
    "spec", ["post.2, embed, post.58", "post.2, post.30", "post.1, post.29, post.57", None]
)
def test_the_page_is_a_matrix_with_right_and_wrong_in_words_too(family, spec):
    asked = ExplainOptions(family=family, layers=61, spec=None if spec is None else CaptureSpec.parse(spec))
    report = explain_ids([2, 30, 58], asked)
    found = Page(page(report))
    assert summary(report).sentence in found.text
    judged = {True: ("right", "✓"), False: ("wrong", "✗"), None: ("unknown", "?")}
    expected = []
    for line in summary(report).lines:
        fed = slots(line.row, report.trained.inputs)
        expected += [(*judged[slot.right], slot.text.split()[0]) for slot in fed]
        expected += [] if fed else [("wrong", "✗", "nothing")]
    cells = [(kind[0], *text.split()[:2]) for kind, text in found.cells if kind]
    assert cells[: len(expected)] == expected
    assert {row.source for row in report.rows} <= {*found.text}, "the history is there"


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_hostile_file_does_not_get_into_the_page(broken, more):
    bad = f"</style></title><script>alert(1)</script><img src=x onerror='a'>\"&{more}"
    config = {"architectures": [bad], "hidden_act": bad, "model_type": bad, "eagle_config": {bad: bad}}
    head = broken(config, [("fc.bias", torch.ones(8)), (f"x{bad}"[:60], torch.ones(1))])
    text = page(explain_head(head, ExplainOptions(family=bad, layers=30)))
    found = Page(text)
    tags = {tag for tag, _ in found.tags}
    assert tags <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "dt", "dd", "div", "span"),
        *("table", "thead", "tbody", "tr", "th", "td", "b", "br", "code", "small", "section", "details"),
        "summary",
    }
    names = {name for _, attributes in found.tags for name in attributes}
    assert names <= {"lang", "charset", "name", "content", "http-equiv", "class", "data-column"}
    assert "http:" not in text
    assert "https:" not in text


def test_the_page_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "page.html"
    target.write_text("an older page")
    code, text, _ = run(*FED, "--html", str(target))
    assert code == 0
    assert f"saved {target}" in text.replace("\n", "")
    assert target.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    document = run(*FED, "--json", "--html", str(target))[1]
    assert document == run(*FED, "--json")[1]
    assert run(*FED, "--html", str(target), "--engine", "vllm")[0] == 1, "and the exit code is the report's"


@pytest.mark.parametrize(
    ("name", "message"),
    [("", "is a directory or a device"), ("no/page.html", "is no directory"), ("config.json", "itself")],
)
def test_a_page_that_cannot_be_is_refused(broken, name, message):
    head = Path(broken())
    before = (head / "config.json").read_bytes()
    code, _, error = run(str(head), "--html", str(head / name))
    assert code == 1
    assert message in error
    assert (head / "config.json").read_bytes() == before


def test_the_pages_examples_are_what_is_printed():
    examples = re.findall(r"```console\n\$ capture-hooks explain (.*?)\n(.*?)```", DOCS, re.DOTALL)
    assert len(examples) >= 2
    for command, expected in examples:
        words = re.findall(r"'[^']*'|\S+", command)
        text = run(*(word.strip("'") for word in words), COLUMNS="100")[1]
        assert [line.rstrip() for line in text.strip().splitlines()] == expected.strip().splitlines()
