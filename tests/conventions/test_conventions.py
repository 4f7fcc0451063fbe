"""The main rules of the engines against literal simulations of what they do with the numbers, exhaustively.

The simulations below are written from each library's source (the setter that turns configured ids into
boundaries, and the loop that captures), not from our conventions.  They return the boundaries that come
out, in the order of the concatenated columns; ``None`` stands for the final norm.  The libraries' own code
is run in ``tests/interop``.
"""

import subprocess
import sys
from collections.abc import Callable
from itertools import chain, combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks import CaptureSpec, Point
from capture_hooks.conventions import BUILTIN, convention_for, engine_ids
from capture_hooks.errors import ConventionError


def loop(layers_to_capture: list[int], n: int, after: bool, first: int = 0) -> list[int | None]:
    """`for i in range(n): if i in layers_to_capture: ...`, and a last look after the loop if ``after``."""
    seen: list[int | None] = [i for i in range(first, n) if i in layers_to_capture]
    return [*seen, n] if after and n in layers_to_capture else seen


def sglang_llama(ids: list[int], n: int) -> list[int | None]:
    return loop([val + 1 for val in ids], n, after=False)


def sglang_gemma4(ids: list[int], n: int) -> list[int | None]:
    return loop([val + 1 for val in ids], n, after=True)


def sglang_deepseek(ids: list[int], n: int) -> list[int | None]:
    layers = [val + 1 for val in ids] if ids and ids[0] == 1 else list(ids)
    return loop(layers, n, after=False)


def sglang_gpt_oss(ids: list[int], n: int) -> list[int | None]:
    layers = list(ids) if ids and max(ids) == n else [val + 1 for val in ids]
    return loop(layers, n, after=True)


def vllm(ids: list[int], n: int) -> list[int | None]:
    layers = tuple(sorted(set(ids)))
    seen: list[int | None] = [0] if 0 in layers else []
    return seen + [i + 1 for i in range(n) if i + 1 in layers]


def vllm_deepseek(ids: list[int], n: int) -> list[int | None]:
    layers = tuple(sorted(set(ids)))
    if 0 in layers:
        return []  # hidden + None: it crashes, nothing comes out
    return loop(list(layers), n, after=True)


def transformers(ids: list[int], n: int) -> list[int | None]:
    hidden_states = [*range(n), None]
    return [hidden_states[k] for k in ids] if all(-n - 1 <= k <= n for k in ids) else []


def transformers_recurrent(ids: list[int], n: int) -> list[int | None]:
    hidden_states = [*range(1, n + 1), None]
    return [hidden_states[k] for k in ids] if all(-n - 1 <= k <= n for k in ids) else []


SIMULATIONS: dict[str, Callable[[list[int], int], list[int | None]]] = {
    "sglang.llama": sglang_llama,
    "sglang.gemma4": sglang_gemma4,
    "sglang.minimax_m3_vl": sglang_gemma4,
    "sglang.deepseek": sglang_deepseek,
    "sglang.gpt_oss": sglang_gpt_oss,
    "sglang.none": lambda ids, n: [],
    "vllm": vllm,
    "vllm.deepseek": vllm_deepseek,
    "vllm.many_streams": lambda ids, n: [],
    "transformers": transformers,
    "transformers.recurrent": transformers_recurrent,
}
names = pytest.mark.parametrize("name", sorted(SIMULATIONS))
layers = st.integers(1, 12)
#: Mostly plausible lists, and everything else as well.
id_lists = st.one_of(
    st.sets(st.integers(0, 12), max_size=5).map(sorted),
    st.lists(st.integers(-2, 14), max_size=5),
)


def boundaries(points: tuple[Point, ...], n: int) -> list[int | None]:
    return [point.resolve(n).boundary for point in points]


def unless_refused(convert: Callable[[Any, int], Any], request: Any, n: int) -> Any:
    try:
        return convert(request, n)
    except ConventionError:
        return None


@names
@settings(deadline=None, max_examples=40)
@given(ids=id_lists, n=layers)
def test_ids_mean_what_the_library_captures_or_are_refused(name: str, ids: list[int], n: int) -> None:
    captured = SIMULATIONS[name](ids, n)
    points = unless_refused(BUILTIN[name].to_points, ids, n)
    if points is not None:
        assert boundaries(points, n) == captured
        assert len(points) == len(ids), "a column was dropped silently"


@st.composite
def point_lists(draw: st.DrawFn) -> tuple[tuple[Point, ...], int]:
    n = draw(layers)
    layer = st.integers(-n, n - 1)
    point = st.one_of(
        st.just(Point("embed")),
        st.just(Point("final_norm")),
        layer.map(Point.pre),
        layer.map(Point.post),
        st.just(Point("out", module="model.layers.0.mlp")),
    )
    points = draw(st.lists(point, max_size=5))
    if draw(st.booleans()):  # a plausible one: by depth, each state once
        by_site = {p.resolve(n): p for p in points if p.kind != "out"}
        points = [by_site[s] for s in sorted(by_site, key=lambda s: n + 1 if s.norm else s.boundary)]
    return tuple(points), n


@names
@settings(deadline=None, max_examples=40)
@given(request=point_lists())
def test_points_come_back_as_the_library_would_capture_them(
    name: str, request: tuple[tuple[Point, ...], int]
) -> None:
    points, n = request
    ids = unless_refused(BUILTIN[name].from_points, points, n)
    if ids is None:
        return
    wanted = boundaries(points, n)
    assert SIMULATIONS[name](ids, n) == wanted
    assert boundaries(BUILTIN[name].to_points(ids, n), n) == wanted
    assert CaptureSpec(points).resolve(n) == CaptureSpec(BUILTIN[name].to_points(ids, n)).resolve(n)


@names
def test_every_short_list_is_taken_exactly_where_nothing_is_lost(name: str) -> None:
    """All lists of up to three ids: taken if each brings its own state in the order written."""
    simulate, convert = SIMULATIONS[name], BUILTIN[name].to_points
    for n in range(1, 6):
        for ids in chain.from_iterable(product(range(n + 2), repeat=length) for length in range(1, 4)):
            captured = simulate(list(ids), n)
            ascending = name.startswith("transformers") or sorted(ids) == list(ids)
            exact = ascending and len(captured) == len(ids) == len(set(ids))
            points = unless_refused(convert, ids, n)
            assert (points is not None) == exact, (ids, n)
            assert points is None or boundaries(points, n) == captured


@names
def test_points_are_refused_only_where_no_ids_would_do(name: str) -> None:
    """All ascending boundaries of small models: if some list of ids captures them, one is found."""
    simulate, convert = SIMULATIONS[name], BUILTIN[name].from_points
    for n in range(1, 6):
        lists = [list(ids) for k in range(1, 5) for ids in combinations(range(n + 2), k)]
        for wanted in (list(b) for k in range(1, 5) for b in combinations(range(n + 1), k)):
            points = tuple(Point("embed") if b == 0 else Point.post(b - 1) for b in wanted)
            possible = [ids for ids in lists if simulate(ids, n) == wanted and len(ids) == len(wanted)]
            found = unless_refused(convert, points, n)
            assert (found in possible) if possible else (found is None), (wanted, n, found)


# What the setters make of four configured lists, as boundaries, for a model of 36 layers: run in the library.
@pytest.mark.parametrize(
    ("name", "ids", "expected"),
    [
        ("sglang.llama", [1, 17, 32], [2, 18, 33]),
        ("sglang.llama", [2, 18, 33], [3, 19, 34]),
        ("sglang.llama", [24, 30, 36], None),  # 37 never fires
        ("sglang.deepseek", [1, 17, 32], [2, 18, 33]),
        ("sglang.deepseek", [2, 18, 33], [2, 18, 33]),
        ("sglang.deepseek", [3, 17, 32], [3, 17, 32]),
        ("sglang.deepseek", [24, 30, 36], None),  # 36 never fires
        ("sglang.gpt_oss", [1, 17, 32], [2, 18, 33]),
        ("sglang.gpt_oss", [2, 18, 33], [3, 19, 34]),
        ("sglang.gpt_oss", [24, 30, 36], [24, 30, 36]),
        ("sglang.minimax_m3_vl", [2, 18, 33], [3, 19, 34]),
        ("vllm", [2, 18, 33], [2, 18, 33]),
        ("vllm", [2, 18, 36], [2, 18, 36]),
        ("vllm", [0, 18, 37], None),
    ],
)
def test_measured_cases(name: str, ids: list[int], expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(ConventionError):
            BUILTIN[name].to_points(ids, 36)
    else:
        assert boundaries(BUILTIN[name].to_points(ids, 36), 36) == expected


def test_the_list_that_misled_a_deployment() -> None:
    """Kimi-K2.5, 61 layers: [2, 30, 58] are inputs there, and outputs on a llama."""
    ids = [2, 30, 58]
    kimi = convention_for("sglang", "kimi_k25").to_points(ids, 61)
    llama = convention_for("sglang", "llama").to_points(ids, 61)
    assert boundaries(kimi, 61) == [2, 30, 58]
    assert boundaries(llama, 61) == [3, 31, 59]
    with pytest.raises(ConventionError, match=r"-1 is negative"):
        convention_for("sglang", "kimi_k25").to_points([-1, 2, 30], 61)


@pytest.mark.parametrize(
    "model_type", ["llama", "deepseek_v3", "gpt_oss", "gemma4_text", "qwen3_moe", "kimi_k25"]
)
@pytest.mark.parametrize("n", [7, 8, 36, 61])
def test_the_default_layers_are_the_same_tensors_in_both_engines(model_type: str, n: int) -> None:
    points = CaptureSpec.eagle3(n).inputs
    assert engine_ids("sglang", points, n, model_type).ids == [1, n // 2 - 1, n - 4]
    assert engine_ids("vllm", points, n, model_type).ids == [2, n // 2, n - 3]


def test_lookup_prefers_the_family_and_falls_back_to_the_rest() -> None:
    assert convention_for("vllm", "llama").name == "vllm"
    assert convention_for("vllm", "deepseek_v3").name == "vllm.deepseek"
    assert convention_for("sglang", "gpt2").name == "sglang.none"
    assert BUILTIN["transformers"].library == "transformers"


def test_lookup_names_what_there_is() -> None:
    with pytest.raises(ConventionError, match=r"no library 'tgi' is known.*sglang"):
        convention_for("tgi", "llama")
    with pytest.raises(ConventionError, match=r"no key of sglang 'no\.such\.key' is known"):
        convention_for("sglang", "llama", key="no.such.key")
    with pytest.raises(ConventionError, match=r"no convention 'sglang\.lama' .*did you mean 'sglang\.llama'"):
        BUILTIN["sglang.lama"]
    assert "sglang.lama" not in BUILTIN
    assert BUILTIN.get("sglang.lama") is None


def test_a_loop_that_leaves_out_the_residual_names_no_point_of_the_stream() -> None:
    gemma3 = convention_for("sglang", "gemma3_text")
    points = gemma3.to_points([0, 5], 8)
    assert [str(p) for p in points] == [f"out:model.layers.{k}.post_feedforward_layernorm" for k in (0, 5)]
    assert gemma3.from_points(points, 8) == [0, 5]
    with pytest.raises(
        ConventionError, match=r"post\.5 cannot be captured: its loop leaves out the residual"
    ):
        gemma3.from_points([Point.post(5)], 8)
    assert convention_for("sglang", "gemma3").to_points([0], 8)[0].module.startswith("model.language_model.")


def test_an_engine_that_cannot_is_excluded_with_the_reason() -> None:
    last = (Point.post(2), Point.post(35))
    llama = engine_ids("sglang", last, 36, "llama")
    assert llama.ids is None
    assert "post.35 is boundary 36" in str(llama.excluded)
    assert engine_ids("sglang", last, 36, "gemma4_text").ids == [2, 35]
    assert engine_ids("vllm", last, 36, "llama").ids == [3, 36]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "there are no ids"),
        ([3, 2], "do not ascend"),
        ([2, 2], "2 stands there twice"),
        ([-1, 2], "-1 is negative"),
        ([True, 2], "True is not an integer"),
        ([2.0], "2.0 is not an integer"),
        ([11], "id 11 is boundary 12"),
    ],
)
def test_refusals_quote_the_value_and_the_reason(ids: list[int], message: str) -> None:
    with pytest.raises(ConventionError, match=message) as caught:
        BUILTIN["sglang.llama"].to_points(ids, 12)
    assert "sglang.llama (sglang 0.5.22 to 0.5.23" in str(caught.value)
    assert "12 layers" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("post.2, post.1", r"post\.1 comes after a deeper point.*fc columns"),
        ("post.2, pre.3", r"post\.2 and pre\.3 are one state"),
        ("embed, post.2", r"embed is boundary 0"),
        ("post.2, final_norm", r"final_norm is the output of a norm"),
        ("out:model.norm", r"out:model\.norm is a module's value"),
        ("post.12", r"post\.12 is outside a model of 12 layers"),
    ],
)
def test_points_that_cannot_be_said_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConventionError, match=message):
        BUILTIN["sglang.llama"].from_points(CaptureSpec.parse(text).inputs, 12)


def test_the_cores_own_are_there_without_torch_and_without_plugins() -> None:
    code = (
        "import sys, capture_hooks.conventions as c; c.convention_for('vllm', 'llama'); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'capture_hooks.plugins')))"
    )
    environ = {"CAPTURE_HOOKS_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ)
