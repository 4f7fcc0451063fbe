"""The residual layouts of serving engines, on modules that treat their buffers as those engines do."""

import pytest
import torch
from torch import nn

from capture_hooks import bind
from capture_hooks.capture import Anatomy
from capture_hooks.errors import CaptureError

HIDDEN, LAYERS, TOKENS = 8, 4, 5


class AddNorm(nn.Module):
    """A fused add-norm: updates ``residual`` in place, gives ``(normed, residual)``."""

    def forward(self, hidden_states, residual=None):
        if residual is None:
            return hidden_states / (1 + hidden_states.abs())
        residual.add_(hidden_states)
        return residual / (1 + residual.abs()), residual


class PairLayer(nn.Module):
    """``(positions, hidden, batch, residual) -> (hidden, residual)``; residual None at layer 0."""

    def __init__(self):
        super().__init__()
        self.norm, self.mix = AddNorm(), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions, hidden_states, forward_batch, residual):
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.norm(hidden_states)
        else:
            hidden_states, residual = self.norm(hidden_states, residual)
        return self.mix(hidden_states), residual


class ResidualStream:
    """Keeps the stream's settled part; what a layer gives is added only where the next one begins."""

    def __init__(self):
        self.residual = None

    def enter(self, value):
        if self.residual is None:
            self.residual = value.clone()
        else:
            self.residual.add_(value)
        return self.residual

    def snapshot(self, value):
        return value.clone() if self.residual is None else value + self.residual


class Batch:
    def __init__(self, stream=None):
        self.residual_stream = stream


class StreamLayer(nn.Module):
    """``(positions, hidden, batch) -> handle``; the residual lives on the batch."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions, hidden_states, forward_batch):
        stream = forward_batch.residual_stream.enter(hidden_states)
        return self.mix(stream / (1 + stream.abs()))


class Engine(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, HIDDEN)
        self.layers = nn.ModuleList([layer() for _ in range(LAYERS)])
        self.norm, self.head = AddNorm(), nn.Linear(HIDDEN, 16)
        self.pair = layer is PairLayer

    def forward(self, input_ids, positions, forward_batch, keywords=False):
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            if self.pair and keywords:
                hidden, residual = layer(
                    positions=positions, hidden_states=hidden, forward_batch=forward_batch, residual=residual
                )
            elif self.pair:
                hidden, residual = layer(positions, hidden, forward_batch, residual)
            else:
                hidden = layer(positions, hidden, forward_batch)
        if not self.pair:
            residual = forward_batch.residual_stream.residual
        return self.head(self.norm(hidden, residual)[0])


def anatomy(model, layout):
    return Anatomy(
        model=model,
        decoder=model,
        decoder_name="",
        layers=tuple(model.layers),
        layer_names=tuple(f"layers.{k}" for k in range(LAYERS)),
        embedding=model.embed,
        final_norm=model.norm,
        final_norm_name="norm",
        lm_head=model.head,
        hidden_size=HIDDEN,
        vocab_size=16,
        layout=layout,
    )


def boundaries(model, ids):
    """The stream at every boundary, written out of place: what both engines compute."""
    stream = model.embed(ids)
    found = [stream]
    for layer in model.layers:
        stream = stream + layer.mix(stream / (1 + stream.abs()))
        found.append(stream)
    return found


@pytest.mark.parametrize(("layer", "layout"), [(PairLayer, "pair"), (StreamLayer, "stream")])
@pytest.mark.parametrize("keywords", [False, True])
def test_every_point_is_the_whole_stream(layer, layout, keywords):
    model = Engine(layer)
    ids = torch.arange(TOKENS)
    points = ["embed", *(f"post.{k}" for k in range(LAYERS))]
    named = {
        "embed": 0,
        **{f"post.{k}": k + 1 for k in range(LAYERS)},
        **{f"pre.{k}": k for k in range(LAYERS)},
    }
    with torch.no_grad():
        expected = boundaries(model, ids)
        with (
            bind(model, ", ".join(points), target=True, anatomy=anatomy(model, layout)) as capture,
            bind(
                model, ", ".join(f"pre.{k}" for k in range(LAYERS)), anatomy=anatomy(model, layout)
            ) as entering,
        ):
            model(ids, ids, Batch(ResidualStream()), keywords)
    for states in (capture.states, entering.states):
        for point in states.columns:
            torch.testing.assert_close(states[point], expected[named[point]])
    end = expected[-1]
    torch.testing.assert_close(capture.states.target, end / (1 + end.abs()))
    assert capture.states.position.tolist() == list(range(TOKENS))


def test_a_layer_that_breaks_its_layouts_promise_is_named():
    model = Engine(StreamLayer)
    with (
        torch.no_grad(),
        bind(model, "post.1", anatomy=anatomy(model, "pair")),
        pytest.raises(CaptureError, match=r"layers\.1 returned Tensor, not the pair"),
    ):
        model(torch.arange(3), torch.arange(3), Batch(ResidualStream()))
    model = Engine(PairLayer)
    with (
        torch.no_grad(),
        bind(model, "pre.1", anatomy=anatomy(model, "stream")),
        pytest.raises(
            CaptureError, match=r"layers\.1 was called without a batch that carries a residual_stream"
        ),
    ):
        model(torch.arange(3), torch.arange(3), Batch())
