"""Conventions of the second rank against what their libraries' code does with the numbers, line for line.

The functions below are the libraries' own loops, written from the sources that the conventions state, and
return the boundaries that come out, in the order of the concatenated columns; ``None`` stands for the final
norm.  Where the library raises, they raise.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.conventions.rules import spread
from capture_hooks.errors import ConventionError
from capture_hooks.plugins import build_registry

INSTALLED = build_registry(entry_points=())
LIBRARIES = ("angelslim", "dflash", "eagle", "llama_cpp", "nemo_automodel", "tensorrt_llm", "torchspec")
READ = {name: found for name, found in INSTALLED.conventions.items() if found.library in LIBRARIES}
Boundaries = list[int | None]


def hidden_states(n: int) -> Boundaries:
    """The tuple of transformers: the inputs of the layers, and the final norm."""
    return [*range(n), None]


def plus_one(ids: list[int], n: int) -> Boundaries:
    states = hidden_states(n)
    return [states[layer_id + 1] for layer_id in ids]


def list_of_outputs(ids: list[int], n: int) -> Boundaries:
    outputs: Boundaries = list(range(1, n + 1))
    return [outputs[layer_id] for layer_id in ids]


def torchspec(ids: list[int], n: int) -> Boundaries:
    captured = {}
    for idx in ids:
        if not 0 <= idx < n:
            raise ValueError
        captured[idx] = idx + 1
    if len(captured) != len(ids):
        raise RuntimeError
    return [captured[idx] for idx in ids]


def torchspec_vllm(ids: list[int], n: int) -> Boundaries:
    told = [lid + 1 for lid in ids if lid < n]
    if n not in told:
        told.append(n)
    by_vllm = [k for k in range(n + 1) if k in told]
    if len(by_vllm) != len(told) or len(told) < 2:
        raise RuntimeError  # the connector would split other columns than it thinks
    return list(by_vllm[: len(told) - 1])


def tensorrt_llm(ids: list[int], n: int, last: bool = False) -> Boundaries:
    layers_to_capture = sorted(set(ids))
    if last and layers_to_capture[0] == -1:
        layers_to_capture = [*layers_to_capture[1:], -1]
    columns: list[int | str | None] = ["uninitialised"] * len(layers_to_capture)
    for layer_idx in [*range(n), -1]:
        if layer_idx in layers_to_capture:
            columns[layers_to_capture.index(layer_idx)] = None if layer_idx == -1 else layer_idx + 1
    if "uninitialised" in columns:
        raise RuntimeError
    return columns  # type: ignore[return-value]


def nemo(ids: list[int], n: int) -> Boundaries:
    if len(ids) != 3 or len(set(ids)) != len(ids) or any(k < 0 or k >= n for k in ids):
        raise ValueError
    return [k + 1 for k in ids]


def nemo_dflash(ids: list[int], n: int) -> Boundaries:
    if any(k < 0 or k >= n for k in ids):
        raise ValueError
    captured = {k: k + 1 for k in ids}
    if len(captured) != len(ids):
        raise RuntimeError
    return [captured[k] for k in ids]


def nemo_dspark(ids: list[int], n: int) -> Boundaries:
    previous = None
    for layer_id in ids:
        assert layer_id == -1 or 0 <= layer_id <= n - 1
        assert previous is None or layer_id > previous
        previous = layer_id
    return [0 if k == -1 else None if k == n - 1 else k + 1 for k in ids]


def llama_cpp(end: int | str | None) -> Callable[[list[int], int], Boundaries]:
    def simulate(ids: list[int], n: int) -> Boundaries:
        if len(ids) != 3:
            raise RuntimeError
        for k in ids:
            if not (0 <= k < n or (k == n and end != "absent")):
                raise RuntimeError
        return [k if k < n else (n if end == "end" else None) for k in ids]

    return simulate


def llama_cpp_dflash(to_end: bool) -> Callable[[list[int], int], Boundaries]:
    def simulate(ids: list[int], n: int) -> Boundaries:
        t_layer_inp: Boundaries = [*range(n), *([n] if to_end else [])]
        found: Boundaries = []
        for lid in [k + 1 for k in ids]:
            if not 0 <= lid < len(t_layer_inp):
                raise RuntimeError
            found.append(t_layer_inp[lid])
        return found

    return simulate


def nothing(ids: list[int], n: int) -> Boundaries:
    raise RuntimeError


def eagle(ids: list[int], n: int) -> Boundaries:
    return [idx for idx in range(n) if idx == n - 3 or idx == n // 2 or idx == 2]


SIMULATIONS: dict[str, Callable[[list[int], int], Boundaries]] = {
    "angelslim": plus_one,
    "angelslim.vllm": list_of_outputs,
    "dflash": plus_one,
    "dflash.mlx": list_of_outputs,
    "eagle": eagle,
    "llama_cpp": llama_cpp("absent"),
    "llama_cpp.dflash": llama_cpp_dflash(to_end=False),
    "llama_cpp.dflash_none": nothing,
    "llama_cpp.dflash_to_end": llama_cpp_dflash(to_end=True),
    "llama_cpp.final_norm": llama_cpp(None),
    "llama_cpp.none": nothing,
    "llama_cpp.to_end": llama_cpp("end"),
    "nemo_automodel": nemo,
    "nemo_automodel.dflash": nemo_dflash,
    "nemo_automodel.dspark": nemo_dspark,
    "tensorrt_llm": tensorrt_llm,
    "tensorrt_llm.dump": lambda ids, n: tensorrt_llm(ids, n, last=True),
    "torchspec": torchspec,
    "torchspec.vllm": torchspec_vllm,
}


def test_every_one_has_a_simulation() -> None:
    assert set(SIMULATIONS) == set(READ)


def out_of(simulate: Callable[[list[int], int], Boundaries], ids: list[int], n: int) -> Boundaries | None:
    try:
        return simulate(ids, n)
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return None


def boundaries(points: Any, n: int) -> Boundaries:
    return [point.resolve(n).boundary for point in points]


layers = st.integers(1, 12)
id_lists = st.one_of(
    st.lists(st.integers(-14, 14), min_size=1, max_size=5),
    st.lists(st.integers(-2, 12), min_size=3, max_size=3),
    st.sets(st.integers(-1, 12), min_size=1, max_size=5).map(sorted),
)


@pytest.mark.parametrize("name", sorted(SIMULATIONS))
@settings(deadline=None, max_examples=120)
@given(ids=id_lists, n=layers)
def test_what_is_captured_is_what_the_code_captures(name: str, ids: list[int], n: int) -> None:
    expected = out_of(SIMULATIONS[name], ids, n)
    try:
        found = READ[name].captured(ids, n)
    except ConventionError:
        assert expected is None, (ids, n)
        return
    assert boundaries(found.points, n) == expected, (ids, n)


#: The default lists as they stand in the code; None where the code has none, or takes it from the draft.
DEFAULTS = {
    "angelslim": "[1, total_layers // 2 - 1, total_layers - 4]",
    "angelslim.vllm": "[1, total_layers // 2 - 1, total_layers - 4]",
    "eagle": "[]",
    "llama_cpp": "[2, total_layers // 2, total_layers - 3]",
    "llama_cpp.final_norm": "[2, total_layers // 2, total_layers - 3]",
    "llama_cpp.none": "[2, total_layers // 2, total_layers - 3]",
    "llama_cpp.to_end": "[2, total_layers // 2, total_layers - 3]",
    "nemo_automodel": "[1, total_layers // 2 - 1, total_layers - 4]",
    "tensorrt_llm": "[0] if total_layers == 1 else [1, total_layers // 2 - 1, total_layers - 4]",
    "tensorrt_llm.dump": "[1, total_layers // 2 - 1, total_layers - 4]",
    "torchspec": "[1, total_layers // 2 - 1, total_layers - 4]",
    "torchspec.vllm": "[1, total_layers // 2 - 1, total_layers - 4]",
}


@pytest.mark.parametrize("name", sorted(SIMULATIONS))
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 36, 61])
def test_the_default_is_what_the_code_makes_of_its_own_list(name: str, n: int) -> None:
    stated = DEFAULTS.get(name)
    ids = None if stated is None else eval(stated, {"total_layers": n})
    expected = None if ids is None else out_of(SIMULATIONS[name], ids, n)
    if name.startswith("tensorrt_llm") and (1 < n <= 5 or (n == 1 and name.endswith("dump"))):
        expected = None  # "Not enough hidden layers for default EAGLE3 capture"
    if expected is None:
        with pytest.raises(ConventionError):
            READ[name].default(n)
    else:
        assert boundaries(READ[name].default(n).points, n) == expected


def test_one_number_is_three_tensors_in_llama_cpp() -> None:
    """Id n: nothing, the un-normed end, or the final norm, by what the target's graph hands out."""
    ids, n = [2, 18, 36], 36
    with pytest.raises(ConventionError, match="id 36 is no layer's input"):
        READ["llama_cpp"].to_points(ids, n)
    assert str(READ["llama_cpp.to_end"].to_points(ids, n)[-1]) == "post.35"
    assert str(READ["llama_cpp.final_norm"].to_points(ids, n)[-1]) == "final_norm"


def test_a_head_trained_on_tensorrt_llms_dump_is_served_with_its_columns_rotated() -> None:
    dumped = READ["tensorrt_llm.dump"].to_points([1, 17, -1], 36)
    assert [str(point) for point in dumped] == ["post.1", "post.17", "final_norm"]
    with pytest.raises(ConventionError, match="permute the head's fc columns"):
        READ["tensorrt_llm"].from_points(dumped, 36)
    served = READ["tensorrt_llm"].captured([1, 17, -1], 36)
    assert [str(point) for point in served.points] == ["final_norm", "post.1", "post.17"]
    assert served.quirks == ("the ids are sorted first",)


@given(n=st.integers(4, 200), count=st.integers(1, 12))
def test_dflashs_default_goes_from_the_second_layer_to_the_third_last(n: int, count: int) -> None:
    ids = spread(n, count)
    assert len(ids) == count
    assert ids == sorted(ids)
    assert all(0 <= k < n for k in ids)
    assert count == 1 or (ids[0], ids[-1]) == (1, n - 3)


READER = {name: reader for name, reader in INSTALLED.readers.items() if reader.library in LIBRARIES}
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512, "num_hidden_layers": 1}


def test_llama_cpps_converter_reads_the_top_level_and_nothing_nested() -> None:
    ids = [3, 17, 30]
    top = READER["llama_cpp"].read({**HEAD, "eagle_aux_hidden_state_layer_ids": ids}, "llama", 36)
    assert (top.convention, top.key, top.ids) == (
        "llama_cpp",
        "eagle_aux_hidden_state_layer_ids",
        (3, 17, 30),
    )
    assert top.captured is not None
    assert boundaries(top.captured.points, 36) == ids
    nested = READER["llama_cpp"].read(
        {**HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}, "llama", 36
    )
    assert (nested.key, nested.ids) == (None, None)
    assert nested.captured is not None
    assert boundaries(nested.captured.points, 36) == [2, 18, 33]
    two = READER["llama_cpp"].read({**HEAD, "eagle_aux_hidden_state_layer_ids": [3, 17]}, "llama", 36)
    assert two.captured is None
    assert "exactly 3" in str(two.refusal)


def test_llama_cpps_converter_refuses_or_mistakes_other_heads() -> None:
    other = READER["llama_cpp"].read({**HEAD, "architectures": ["Eagle3LlamaForCausalLM"]}, "llama", 36)
    assert (other.convention, other.captured) == (None, None)
    assert "no class for a draft of architecture 'Eagle3LlamaForCausalLM'" in str(other.refusal)
    deep = READER["llama_cpp"].read({**HEAD, "num_hidden_layers": 2}, "llama", 36)
    assert "for a plain Llama" in str(deep.refusal)
    speculators = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": 512,
        "transformer_layer_config": {"num_hidden_layers": 1},
    }
    assert READER["llama_cpp"].read(speculators, "gpt_oss", 36).convention == "llama_cpp.to_end"


def test_dflash_heads_are_read_by_their_own_keys() -> None:
    head = {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 9, 35]}}
    hf, mlx = (READER[name].read(head, "qwen3", 36) for name in ("dflash", "dflash.mlx"))
    assert hf.captured is not None
    assert mlx.captured is not None
    assert boundaries(hf.captured.points, 36) == [2, 10, None]
    assert boundaries(mlx.captured.points, 36) == [2, 10, 36]
    gguf = READER["llama_cpp"].read(head, "qwen3", 36)
    assert gguf.captured is None
    top = READER["llama_cpp"].read(
        {"architectures": ["DFlashDraftModel"], "target_layer_ids": [1, 9]}, "qwen3", 36
    )
    assert (top.key, top.ids) == ("target_layer_ids", (1, 9))
    without = {"dflash_config": {}, "num_target_layers": 36, "num_hidden_layers": 5}
    spread_out = READER["dflash"].read(without, "qwen3", 36)
    assert spread_out.captured is not None
    assert boundaries(spread_out.captured.points, 36) == [2, 10, 18, 26, 34]
    assert READER["dflash.mlx"].read(without, "qwen3", 36).captured is None


@pytest.mark.parametrize("name", ["eagle", "tensorrt_llm"])
def test_some_engines_look_at_no_ids_of_the_config(name: str) -> None:
    reading = READER[name].read({**HEAD, "eagle_aux_hidden_state_layer_ids": [5, 6, 7]}, "llama", 36)
    assert (reading.key, reading.ids) == (None, None)
    assert reading.captured is not None
    assert boundaries(reading.captured.points, 36) == [2, 18, 33]


json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = (
    *("architectures", "draft_vocab_size", "num_hidden_layers", "num_target_layers", "target_layer_ids"),
    *("eagle_aux_hidden_state_layer_ids", "dflash_config", "eagle_config", "transformer_layer_config"),
)
configs = st.dictionaries(
    st.sampled_from(KEYS),
    st.one_of(
        json,
        st.sampled_from([["LlamaForCausalLMEagle3"], ["DFlashDraftModel"], 1, 36]),
        st.dictionaries(st.sampled_from(["target_layer_ids", "eagle_aux_hidden_state_layer_ids"]), json),
    ),
)


@pytest.mark.parametrize("name", sorted(READER))
@settings(deadline=None, max_examples=150)
@given(config=configs, family=st.sampled_from(["llama", "gpt_oss", "gemma4", "", "x"]), n=st.integers(1, 60))
def test_readers_are_total(name: str, config: dict[str, Any], family: str, n: int) -> None:
    reading = READER[name].read(config, family, n)
    assert (reading.captured is None) == (reading.refusal is not None)
    assert reading.convention is None or reading.convention in READ
    assert (reading.ids is None) or reading.key is not None
