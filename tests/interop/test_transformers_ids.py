"""transformers' conventions against transformers, on models whose states our own hooks capture beside it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from capture_hooks import CaptureSpec, Point, bind
from capture_hooks.conventions import BUILTIN, convention_for
from capture_hooks.errors import ConventionError
from capture_hooks.testing import tiny

TOKENS = torch.tensor([[5, 3, 8, 1, 7]])
N = tiny.LAYERS
#: Those whose decoder is decorated with ``capture_outputs``, so that it knows the settings.
MODERN = ("llama", "qwen3", "gemma3_text", "gpt_oss", "deepseek_v3")
MODELS = {family: tiny.model(family) for family in (*MODERN, "mamba")}
families = st.sampled_from(MODERN)
id_lists = st.lists(st.integers(-N - 3, N + 2), min_size=1, max_size=4)


def tuple_of(family: str, output_hidden_states=True, tie: bool | None = None):
    model = MODELS[family]
    model.config.tie_last_hidden_states = tie
    try:
        with torch.no_grad():
            return model(TOKENS, use_cache=False, output_hidden_states=output_hidden_states).hidden_states
    finally:
        model.config.tie_last_hidden_states = None


def packed(family: str, points: tuple[Point, ...]) -> torch.Tensor:
    """The states by our hooks, side by side; a point may stand there more than once."""
    once = tuple(dict.fromkeys(points))
    with torch.no_grad(), bind(MODELS[family], CaptureSpec(once)) as capture:
        MODELS[family](TOKENS, use_cache=False)
    return torch.cat([capture.states[point] for point in points], dim=-1)


def indexed(entries, indices):
    """As Python indexes the tuple; None for an IndexError."""
    try:
        return torch.cat([entries[k][0] for k in indices], dim=-1)
    except IndexError:
        return None


def ours(name: str, ids: list[int]) -> tuple[Point, ...] | None:
    try:
        return BUILTIN[name].captured(ids, N).points
    except ConventionError:
        return None


def agree(family: str, name: str, ids: list[int], theirs: torch.Tensor | None) -> None:
    points = ours(name, ids)
    assert (points is None) == (theirs is None), (family, name, ids)
    if points:
        assert torch.equal(packed(family, points), theirs), (family, name, ids, points)


@settings(deadline=None, max_examples=40)
@given(family=families, ids=id_lists)
def test_the_tuple_is_indexed(family, ids):
    agree(family, "transformers", ids, indexed(tuple_of(family), ids))


@settings(deadline=None, max_examples=20)
@given(ids=id_lists)
def test_the_tuple_of_a_recurrent_model_is_indexed(ids):
    assert convention_for("transformers", MODELS["mamba"].config.model_type).name == "transformers.recurrent"
    agree("mamba", "transformers.recurrent", ids, indexed(tuple_of("mamba"), ids))


@settings(deadline=None, max_examples=40)
@given(family=families, ids=id_lists)
def test_without_the_tie_the_last_entry_is_not_normed(family, ids):
    agree(family, "transformers.untied", ids, indexed(tuple_of(family, tie=False), ids))


@settings(deadline=None, max_examples=60)
@given(family=families, ids=id_lists, single=st.booleans())
def test_entries_are_selected(family, ids, single):
    selection = ids[0] if single else ids
    if single and ids[0] == 0:  # it is false, and nothing is asked for
        assert tuple_of(family, 0) is None
        return
    entries = tuple_of(family, selection)
    kept = [state[0] for state in entries if state is not None]
    points = ours("transformers.selected", ids[:1] if single else ids)
    assert len(entries) == N + 1
    assert len(kept) == len(points)
    if kept:
        assert torch.equal(packed(family, points), torch.cat(kept, dim=-1))


class ReachedError(Exception):
    """The draft was called."""


def generator(ids: list[int], fed: dict) -> DFlashTokenCandidateGenerator:
    """Transformers' own, with a draft that only keeps what it is fed."""

    def draft(**kwargs):
        fed.update(kwargs)
        raise ReachedError

    made = object.__new__(DFlashTokenCandidateGenerator)
    made.assistant_model, made.target_layer_ids, made.block_size = draft, ids, 4
    made.device, made.main_model_max_length = torch.device("cpu"), 100
    made.is_main_model_prefill = False
    made.main_model_input_embeddings = torch.nn.Embedding(tiny.VOCAB, tiny.HIDDEN)
    made.noise_ids_mask = torch.zeros(1, 3, dtype=torch.long)
    made.cache = SimpleNamespace(crop=lambda _: None, set_previous_accepted_tokens=lambda _: None)
    return made


@settings(deadline=None, max_examples=60)
@given(family=families, ids=st.lists(st.integers(-N - 3, N + 1), min_size=1, max_size=4))
def test_dflash_ids(family, ids):
    """The selection that its constructor asks for, and the concatenation of its ``get_candidates``."""
    length, fed = TOKENS.shape[1], {}
    outputs = SimpleNamespace(hidden_states=tuple_of(family, [i + 1 for i in ids]))
    kwargs = {"position_ids": torch.arange(length + 1)[None], "attention_mask": None}
    followed = torch.cat([TOKENS, TOKENS[:, :1]], dim=-1)
    try:
        generator(ids, fed).get_candidates(followed, kwargs, outputs, False, length - 1)
    except ReachedError:
        agree(family, "transformers.dflash", ids, fed["context_hidden_states"][0])
    except IndexError:
        agree(family, "transformers.dflash", ids, None)


@pytest.mark.parametrize("name", ["transformers", "transformers.untied", "transformers.dflash"])
@given(ids=id_lists)
def test_points_come_back(name, ids):
    points = ours(name, ids)
    told = BUILTIN[name]
    if points is None or told.captured(ids, N).quirks:
        return
    assert told.from_points(points, N) == ids
