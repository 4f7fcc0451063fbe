"""Rows of an engine that packs the requests of a batch into one axis, and tells whose they are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from capture_hooks import bind
from capture_hooks.capture import Anatomy, BatchRows, Phase
from capture_hooks.errors import CaptureError

HIDDEN = 4


class Packed(nn.Module):
    """A decoder over one axis of rows; the state of a row is its value and what the layers add."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, rows, told):
        for layer in self.layers:
            rows = layer(rows) + 1
        return rows


def anatomy(model):
    return Anatomy(
        model=model,
        decoder=model,
        decoder_name="",
        layers=tuple(model.layers),
        layer_names=("layers.0", "layers.1"),
        embedding=nn.Embedding(2, HIDDEN),
        final_norm=None,
        final_norm_name=None,
        lm_head=nn.Linear(HIDDEN, 2),
        hidden_size=HIDDEN,
        vocab_size=2,
        rows=lambda args, kwargs: args[1],
    )


@st.composite
def schedules(draw):
    """Forwards as an engine runs them: each a batch of requests that go on where they were, with padding."""
    done = dict.fromkeys(draw(st.lists(st.text("abc", min_size=1), min_size=1, max_size=3, unique=True)), 0)
    forwards = []
    for _ in range(draw(st.integers(1, 5))):
        batch = draw(st.lists(st.sampled_from(sorted(done)), min_size=1, max_size=3, unique=True))
        lengths = [draw(st.integers(1, 3)) for _ in batch]
        # A request may be rolled back by rejected drafts, but not to its very start: that is a new request.
        starts = [done[r] - draw(st.integers(0, min(2, max(0, done[r] - 1)))) for r in batch]
        for request, start, length in zip(batch, starts, lengths, strict=True):
            done[request] = start + length
        forwards.append((batch, lengths, starts, draw(st.integers(0, 2)), draw(st.booleans())))
    return forwards


@given(schedules(), st.booleans())
def test_every_row_is_found_under_its_request_and_position(forwards, static):
    model, number, expected = Packed(), 0.0, {}
    out = torch.full((64, HIDDEN), float("nan")) if static else None
    order: list[str] = []
    with bind(model, "post.0", anatomy=anatomy(model), out=out) as capture:
        for batch, lengths, starts, padding, as_tensor in forwards:
            for request, start, length in zip(batch, starts, lengths, strict=True):
                order += [] if request in order else [request]
                mine = expected.setdefault(request, {})
                for position in [p for p in mine if p >= start]:
                    del mine[position]
                for position in range(start, start + length):
                    number += 1
                    mine[position] = (number, length == 1 and start > 0)
            rows = sum(lengths)
            values = torch.arange(number - rows + 1, number + 1 + padding)
            given_starts = torch.tensor(starts) if as_tensor else starts
            told = BatchRows(tuple(batch), tuple(lengths), given_starts)
            model(values[:, None].expand(-1, HIDDEN).clone(), told)
    states = capture.states
    assert states.requests == len(order)
    for request, key in enumerate(order):
        own = states.sequence(request)
        assert own.position.tolist() == sorted(expected[key])
        assert own.packed[:, 0].tolist() == [expected[key][p][0] for p in sorted(expected[key])]
        assert (own.phase == Phase.DECODE).tolist() == [expected[key][p][1] for p in sorted(expected[key])]
    if static:
        assert capture.states.packed.shape[0] == sum(len(mine) for mine in expected.values())


def test_a_request_that_begins_again_is_another_one():
    model = Packed()
    with bind(model, "post.0", anatomy=anatomy(model)) as capture:
        for _ in range(2):
            model(torch.zeros(3, HIDDEN), BatchRows(("same",), (3,), (0,)))
    assert capture.states.request.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_cached_prefix_leaves_positions_as_the_engine_counts_them():
    model = Packed()
    with bind(model, "post.0", anatomy=anatomy(model)) as capture:
        model(torch.zeros(2, HIDDEN), BatchRows(("a",), (2,), (5,)))
        model(torch.zeros(2, HIDDEN), BatchRows(("a",), (2,), (9,)))  # 7 and 8 ran elsewhere
    assert capture.states.position.tolist() == [5, 6, 9, 10]


def test_rows_that_cannot_be_told_are_an_error_at_once_or_on_reading_a_static_buffer():
    model = Packed()
    told = BatchRows.untold("a tree of drafts")
    with (
        bind(model, "post.0", anatomy=anatomy(model)),
        pytest.raises(
            CaptureError, match="which request each row of this forward belongs to: a tree of drafts"
        ),
    ):
        model(torch.zeros(2, HIDDEN), told)
    out = torch.zeros(2, HIDDEN)
    with bind(model, "post.0", anatomy=anatomy(model), out=out) as capture:
        model(torch.ones(2, HIDDEN), told)
    assert out.eq(1).all()
    with pytest.raises(CaptureError, match="a tree of drafts"):
        _ = capture.states


def test_more_tokens_than_rows_are_refused():
    model = Packed()
    with (
        bind(model, "post.0", anatomy=anatomy(model)),
        pytest.raises(CaptureError, match=r"2 requests with 5 tokens gave states of 3 rows"),
    ):
        model(torch.zeros(3, HIDDEN), BatchRows(("a", "b"), (2, 3), (0, 0)))
