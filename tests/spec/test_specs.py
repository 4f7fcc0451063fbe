"""Capture specs: text, JSON, its schema, identity, and resolution."""

import doctest
import importlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from capture_hooks import CaptureSpec, Point
from capture_hooks.errors import SpecError
from capture_hooks.spec.points import ALLOWED_FORMS
from capture_hooks.testing.strategies import points, specs

quick = settings(deadline=None, max_examples=50)


@quick
@given(specs())
def test_text_reads_back(spec: CaptureSpec) -> None:
    assert CaptureSpec.parse(str(spec)) == spec
    assert eval(repr(spec), {"CaptureSpec": CaptureSpec}) == spec  # repr is code, as repr promises
    spaced = str(spec).replace(", ", " ,\n\t").replace(" -> ", "->")
    assert CaptureSpec.parse(spaced) == spec


@quick
@given(specs())
def test_json_reads_back_as_text_and_as_an_object(spec: CaptureSpec) -> None:
    document = spec.to_json()
    assert CaptureSpec.from_json(document) == spec
    assert CaptureSpec.from_json(json.dumps(document)) == spec


@quick
@given(specs(), specs())
def test_digest_and_hash_follow_equality(a: CaptureSpec, b: CaptureSpec) -> None:
    assert (a.digest() == b.digest()) == (a == b)
    assert a != b or hash(a) == hash(b)
    assert re.fullmatch(r"[0-9a-f]{64}", a.digest())


def test_the_digest_is_the_same_for_ever() -> None:
    """It is written into dumps and heads: a change of this value orphans every one of them."""
    spec = CaptureSpec.parse("embed, post.-4 -> post.-1")
    assert spec.digest() == "84562b499aa44c90afc0baa34a54562963d647474d7a6006cc1a6806afac61cc"


@quick
@given(specs(n_layers=9).filter(lambda spec: len(spec) > 1), st.randoms(use_true_random=False))
def test_order_is_part_of_the_meaning(spec: CaptureSpec, random: Any) -> None:
    shuffled = list(spec.inputs)
    random.shuffle(shuffled)
    assume(tuple(shuffled) != spec.inputs)
    other = CaptureSpec(tuple(shuffled), spec.target)
    assert other != spec
    assert other.digest() != spec.digest()
    assert other.resolve(9) != spec.resolve(9)


@quick
@given(specs(n_layers=9))
def test_resolution_does_not_depend_on_the_spelling(spec: CaptureSpec) -> None:
    def respelled(point: Point) -> Point:
        boundary = point.resolve(9).boundary
        if boundary is None:
            return point
        return Point.pre(boundary - 9) if boundary < 9 else Point.post(8)

    other = CaptureSpec(tuple(respelled(p) for p in spec.inputs), respelled(spec.target))
    assert other.resolve(9) == spec.resolve(9)
    assert hash(other.resolve(9)) == hash(spec.resolve(9))
    assert spec.absolute(9).resolve(9) == spec.resolve(9)
    assert all(p.layer is None or p.layer >= 0 for p in spec.absolute(9).inputs)


@pytest.mark.parametrize("text", ["post.2, pre.3", "embed, pre.0", "embed, pre.-4", "post.3, post.-1"])
def test_two_names_of_one_state_are_refused_when_the_model_is_known(text: str) -> None:
    spec = CaptureSpec.parse(text)
    with pytest.raises(SpecError, match="are the same state in a model of 4 layers; keep one"):
        spec.resolve(4)
    first, second = text.split(", ")
    with pytest.raises(SpecError, match=re.escape(f"{first} and {second}")):
        spec.resolve(4)


def test_two_sides_of_a_split_boundary_may_both_be_captured() -> None:
    resolved = CaptureSpec.parse("post.0, pre.1").resolve(4, split={1})
    assert len(resolved.inputs) == 2


@pytest.mark.parametrize(
    ("text", "part", "column"),
    [
        ("post.2, pst.15, post.26", "'pst.15'", 8),
        ("post.x", "'post.x'", 0),
        ("post.2,, post.3", "an empty point", 7),
        ("post.2, post.3,", "an empty point", 15),
        ("", "an empty point", 0),
        ("post.2 -> logits", "'logits'", 10),
        ("post.2 ->", "an empty point", 9),
        ("-> post.2", "an empty point", 0),
        ("post.1, post.2 -> post.3 -> post.4", "'post.3 -> post.4'", 18),
        ("post.1 -> post.2, post.3", "'post.2, post.3'", 10),
        ("post.1; post.2", "'post.1; post.2'", 0),
        ("post.-1, post.१", "'post.१'", 9),
    ],
)
def test_errors_quote_the_text_the_position_and_the_allowed_forms(text: str, part: str, column: int) -> None:
    with pytest.raises(SpecError) as caught:
        CaptureSpec.parse(text)
    message = str(caught.value)
    assert f"{part} at position {column} of {text!r}" in message
    assert ALLOWED_FORMS in message
    assert "\n" not in message


@quick
@given(st.text(alphabet="pretosembdfinal_norm.:,->0123456789 \n-", max_size=40))
def test_any_text_gives_a_spec_or_a_spec_error(text: str) -> None:
    try:
        spec = CaptureSpec.parse(text)
    except SpecError:
        return
    assert CaptureSpec.parse(str(spec)) == spec


def test_repeated_and_missing_inputs_are_refused() -> None:
    with pytest.raises(SpecError, match=r"post\.2 appears twice in 'post\.2, embed, post\.2'"):
        CaptureSpec.parse("post.2, embed, post.2")
    with pytest.raises(SpecError, match="needs at least one input"):
        CaptureSpec(())


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", r"capture spec JSON: .*Invalid JSON"),
        ("[]", r"capture spec JSON"),
        ("{}", r"inputs: Field required"),
        ({"inputs": []}, r"inputs: .*at least 1 item"),
        ({"inputs": ["post.2"], "extra": 1}, r"extra: Extra inputs are not permitted"),
        ({"inputs": ["post.2"], "format": 2}, r"format: .*less than or equal to 1.*got 2"),
        ({"inputs": [3]}, r"inputs\.0: .*valid string.*got 3"),
        ({"inputs": "post.2"}, r"inputs: .*valid list"),
        ({"inputs": ["post.2", "pst.3"]}, r"inputs\.1: 'pst\.3' is not a capture point; allowed forms"),
        ({"inputs": ["post.2"], "target": "logits"}, r"target: 'logits' is not a capture point"),
        ({"inputs": ["post.2", "post.2"]}, r"appears twice"),
    ],
)
def test_json_errors_name_the_field(document: str | dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        CaptureSpec.from_json(document)


def matches(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON Schema (draft 2020-12) that the published schema uses; anything else is an error."""
    known = {
        *("title", "description", "default", "type", "properties", "required", "additionalProperties"),
        *("items", "minItems", "pattern", "minimum", "maximum"),
    }
    assert set(schema) <= known, f"the test's validator does not know {set(schema) - known}"
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if "type" in schema and (not isinstance(value, kinds[schema["type"]]) or isinstance(value, bool)):
        return False
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        if not set(schema.get("required", ())) <= set(value):
            return False
        if schema.get("additionalProperties") is False and not set(value) <= set(properties):
            return False
        return all(matches(properties[key], item) for key, item in value.items() if key in properties)
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(matches(schema["items"], v) for v in value)
    if isinstance(value, int):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    # JSON Schema's $ matches at the very end only.
    return re.search(re.sub(r"\$$", r"\\Z", schema["pattern"]), value) is not None


@quick
@given(specs())
def test_every_spec_fits_the_published_schema(spec: CaptureSpec) -> None:
    assert matches(CaptureSpec.json_schema(), spec.to_json())


words = st.one_of(
    points().map(str),
    st.sampled_from(["post", "post.", "embed ", "post.१", "in:", "in:a b", "", "\nembed", "embed\n"]),
)
documents = st.fixed_dictionaries(
    {"inputs": st.one_of(st.lists(words, max_size=3, unique=True), st.just("post.2"), st.just([3]))},
    optional={"target": words, "format": st.sampled_from([0, 1, 2]), "comment": st.just("")},
)


@settings(deadline=None, max_examples=150)
@given(documents)
def test_the_schema_accepts_what_the_reader_accepts(document: dict[str, Any]) -> None:
    try:
        CaptureSpec.from_json(document)
        read = True
    except SpecError:
        read = False
    assert matches(CaptureSpec.json_schema(), document) == read


def test_the_schema_is_json_and_says_what_it_is() -> None:
    schema = json.loads(json.dumps(CaptureSpec.json_schema()))
    assert schema["title"] == "CaptureSpec"
    assert "embed, pre.K, post.K" in schema["properties"]["inputs"]["description"]


@pytest.mark.parametrize("n", [7, 8, 30, 31, 61])
def test_eagle3_default_layers(n: int) -> None:
    """Inputs of layers 2, n//2 and n-3, which is how the first implementation writes them."""
    inputs = CaptureSpec.parse(f"pre.2, pre.{n // 2}, pre.{n - 3}")
    assert CaptureSpec.eagle3(n).resolve(n) == inputs.resolve(n)


@pytest.mark.parametrize("n", [0, 1, 3, 6])
def test_eagle3_default_layers_need_seven(n: int) -> None:
    with pytest.raises(SpecError, match=rf"at least 7 layers, not {n}"):
        CaptureSpec.eagle3(n)


@quick
@given(st.from_type(CaptureSpec), st.from_type(Point))
def test_hypothesis_knows_the_types_by_entry_point(spec: CaptureSpec, point: Point) -> None:
    assert isinstance(spec, CaptureSpec)
    assert isinstance(point, Point)


@pytest.mark.parametrize("module", ["capture_hooks.spec.points", "capture_hooks.spec.specs"])
def test_examples_in_the_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_imports_no_torch() -> None:
    code = (
        "import sys; from capture_hooks import CaptureSpec; CaptureSpec.parse('embed').resolve(3); "
        "CaptureSpec.json_schema(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
