"""The table of conventions itself, and that a refusal carries its reason apart from whose it is."""

import pickle
import re
import tomllib
from dataclasses import fields
from importlib import resources

import pytest

from capture_hooks.conventions.contract import why
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
