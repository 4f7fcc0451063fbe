"""The tables themselves, and that a refusal carries its reason apart from whose it is."""

import pickle
import re
import tomllib
from dataclasses import fields
from importlib import resources

import pytest

from capture_hooks.conventions.contract import why
from capture_hooks.conventions.facts import ARCHITECTURES, FLAGS, KEYS, LIMITS, RULES, SPOKEN_FOR
from capture_hooks.conventions.lookup import rows
from capture_hooks.conventions.readers import builtin_readers
from capture_hooks.errors import ConventionError, RefusalError

TEXT = resources.files("capture_hooks.conventions").joinpath("ids.toml").read_text()
TABLE = tomllib.loads(TEXT)


def test_every_phrase_and_group_of_families_is_used_and_known() -> None:
    for word in TABLE["words"]:
        assert f"{{{word}}}" in TEXT, f"no row says {{{word}}}"
    for group in TABLE["families"]:
        assert f'"@{group}"' in TEXT, f"no row names @{group}"
    for row in (*rows(), *builtin_readers()):
        for field in ("source", "limits", "about", "outside", "no_default", "why"):
            assert not re.search(r"\{\w+\}", str(getattr(row, field, ""))), f"{row.name}.{field}"


def test_an_option_that_changes_nothing_is_not_written() -> None:
    """A row says what is special about it: what equals the rule's own default stands in no row."""
    for group in TABLE["group"]:
        shared = {key: value for key, value in group.items() if key != "row"}
        for row in group.get("row", ()):
            rule = type(next(made for made in rows() if made.name == row["name"]))
            own = {field.name: field.default for field in fields(rule)}
            idle = [key for key, value in row.items() if key not in shared and own.get(key) == value]
            assert not idle, f"{row['name']}: {idle}"


def test_a_refusal_carries_its_reason() -> None:
    llama = next(row for row in rows() if row.name == "sglang.llama")
    with pytest.raises(RefusalError) as caught:
        llama.to_points([30, 2], 61)
    error = caught.value
    assert error.reason.code == "order"
    assert error.reason.text.startswith("cannot take [30, 2] for a model of 61 layers: they do not ascend")
    assert str(error) == f"sglang.llama (sglang {llama.versions}, {llama.key}): {error.reason.text}"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert why(error) == error.reason.text
    assert why(ConventionError("a plugin's own")) == "a plugin's own"


@pytest.mark.parametrize(
    ("name", "ids", "code"),
    [
        ("sglang.llama", [True], "type"),
        ("sglang.llama", [], "count"),
        ("nemo_automodel", [1, 2], "count"),
        ("sglang.llama", [-1, 2], "negative"),
        ("sglang.llama", [2, 2], "twice"),
        ("tensorrt_llm", [3, 2], "order"),
        ("vllm", [99], "outside"),
        ("sglang.none", [1], "never"),
    ],
)
def test_the_code_of_a_reason_says_what_is_wrong(name: str, ids: list[int], code: str) -> None:
    with pytest.raises(RefusalError) as caught:
        next(row for row in rows() if row.name == name).to_points(ids, 36)
    assert caught.value.reason.code == code


def test_facts_name_known_files_flags_and_engines_and_cite_their_sources() -> None:
    text = resources.files("capture_hooks.conventions").joinpath("facts.toml").read_text()
    table = tomllib.loads(text)
    for name in table["files"]:
        assert f"{{{name}}}:" in text, f"no row cites {{{name}}}"
    cited = [(rule.engine, rule.source) for rule in RULES]
    cited += [(limit.engine, source) for limit in LIMITS for source in limit.sources.values()]
    cited += [item for key in KEYS for item in key.sources.items()]
    for engine, sources in cited:
        for source in sources.split("; "):
            assert source.startswith(f"{engine} {table['engine'][engine]['cited']}: ")
            place = source.split(": ", 1)[1]
            assert re.fullmatch(r"[^{}]+", place), source
    drafts = {(row["engine"], row["kind"]): row for row in table["draft"]}
    assert all(tuple(row["flags"]) == FLAGS for row in drafts.values())
    assert len(RULES) == len(drafts) * len(FLAGS)
    for engine, names in ARCHITECTURES.items():
        assert sum(len(row["architectures"]) for (e, _), row in drafts.items() if e == engine) == len(names)
    for limit in LIMITS:
        assert limit.engine in SPOKEN_FOR
        assert all((limit.engine, draft) in drafts for draft in limit.sources), limit
        if limit.rule == "flag":
            rule = next(
                r for r in RULES if (r.engine, r.draft, r.flag) == (limit.engine, "llama", limit.name)
            )
            assert rule.does != "honours", f"{limit.engine} honours {limit.name}"
        if limit.check:
            assert all([limit.sources, limit.what, limit.why, limit.do]), limit
