"""What cannot be captured is one clear error, never a wrong tensor."""

import pytest
import torch
from torch import nn

from capture_hooks import bind
from capture_hooks.capture import Anatomy
from capture_hooks.errors import BindError, CaptureError, SpecError
from capture_hooks.testing import tiny

IDS = torch.tensor([[5, 9, 3, 7]])


@pytest.fixture
def model():
    return tiny.llama()


class Toy(nn.Module):
    """Two linear layers; subclasses run them in other ways."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = (
            nn.Embedding(16, 4),
            nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]),
            nn.Linear(4, 16),
        )

    def forward(self, input_ids):
        return self.head(self.run(self.embed(input_ids)))

    def run(self, x):
        return self.layers[1](self.layers[0](x))

    @property
    def anatomy(self):
        return Anatomy(
            model=self,
            decoder=self,
            decoder_name="",
            layers=tuple(self.layers),
            layer_names=("layers.0", "layers.1"),
            embedding=self.embed,
            final_norm=None,
            final_norm_name=None,
            lm_head=self.head,
            hidden_size=4,
            vocab_size=16,
        )


def test_a_layer_out_of_range(model):
    with pytest.raises(SpecError, match=r"post\.6 is outside a model of 6 layers"):
        bind(model, "post.1, post.6")
    with pytest.raises(SpecError, match=r"pre\.-7 is outside"):
        bind(model, "post.1 -> pre.-7", target=True)
    with pytest.raises(SpecError, match="are the same state"):
        bind(model, "post.1, pre.2")


def test_a_module_that_does_not_exist(model):
    with pytest.raises(
        BindError, match=r"no module 'model\.layers\.2\.mpl'; did you mean .*model\.layers\.2\.mlp"
    ):
        bind(model, "out:model.layers.2.mpl")


def test_a_model_without_a_final_norm():
    toy = Toy()
    with pytest.raises(BindError, match=r"has no final norm.*the end of the stream is post\.1"):
        bind(toy, "post.0", target=True, anatomy=toy.anatomy)


@pytest.mark.parametrize("skipped", ["skips", "calls forward directly"])
def test_a_point_that_never_fired_is_named(skipped):
    class Skips(Toy):
        def run(self, x):
            x = self.layers[0](x)
            return x if skipped == "skips" else self.layers[1].forward(x)

    toy = Skips()
    with (
        torch.no_grad(),
        bind(toy, "post.0, post.1", anatomy=toy.anatomy),
        pytest.raises(
            CaptureError, match=r"never fired in a forward of Skips that completed: post\.1 \(layers\.1\);"
        ),
    ):
        toy(IDS)


def test_a_point_that_fires_twice_is_named():
    class Twice(Toy):
        def run(self, x):
            return self.layers[1](self.layers[1](self.layers[0](x)))

    toy = Twice()
    with (
        torch.no_grad(),
        bind(toy, "post.0, post.1", anatomy=toy.anatomy),
        pytest.raises(CaptureError, match=r"post\.1 \(layers\.1\) fired twice in one forward"),
    ):
        toy(IDS)


def test_no_forward_at_all(model):
    with bind(model, "post.2, embed") as capture:
        pass
    with pytest.raises(CaptureError, match=r"nothing was captured.*post\.2 \(model\.layers\.2\), embed"):
        _ = capture.states


def test_a_state_with_other_rows_than_tokens():
    class Pooled(Toy):
        def run(self, x):
            return self.layers[1](self.layers[0](x).mean(1, keepdim=True))

    toy = Pooled()
    with (
        torch.no_grad(),
        bind(toy, "post.0, post.1", anatomy=toy.anatomy),
        pytest.raises(
            CaptureError,
            match=r"post\.1 .* shape \[1, 1, 4\] in a forward of \[1, 4\] tokens: 1 rows where 4",
        ),
    ):
        toy(IDS)


def test_a_state_of_another_width():
    class Wide(Toy):
        def __init__(self):
            super().__init__()
            self.layers[1] = nn.Linear(4, 6)

        def run(self, x):
            return super().run(x)[..., :4]

    toy = Wide()
    with (
        torch.no_grad(),
        bind(toy, "post.0, post.1", anatomy=toy.anatomy),
        pytest.raises(CaptureError, match=r"post\.1 .* width 6 where 4 was expected"),
    ):
        toy(IDS)


def test_flattened_states_are_put_back_in_order():
    class Flat(Toy):
        def run(self, x):
            return self.layers[1](self.layers[0](x.flatten(0, 1))).view(x.shape)

    toy = Flat()
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.no_grad(), bind(toy, "post.1, pre.0", anatomy=toy.anatomy) as capture:
        toy(ids)
    with torch.no_grad():
        assert torch.equal(capture.states["embed"], toy.embed(ids.flatten()))
    assert capture.states.request.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_mask_that_cannot_be_read(model):
    class Strange:
        shape = (1, 4)

    toy = Toy()
    toy.forward = lambda input_ids, attention_mask=None: Toy.forward(toy, input_ids)
    with torch.no_grad(), bind(toy, "post.0", anatomy=toy.anatomy):
        with pytest.raises(
            CaptureError, match="cannot read padding from attention_mask Strange for 1 sequences of 4"
        ):
            toy(IDS, attention_mask=Strange())
        with pytest.raises(CaptureError, match=r"attention_mask \[1, 2\]"):
            toy(IDS, attention_mask=torch.ones(1, 2))


def test_a_cache_that_does_not_tell_its_length(model):
    toy = Toy()
    toy.forward = lambda input_ids, past_key_values=None: Toy.forward(toy, input_ids)
    with (
        torch.no_grad(),
        bind(toy, "post.0", anatomy=toy.anatomy),
        pytest.raises(CaptureError, match="cannot follow a KV cache of type tuple"),
    ):
        toy(IDS, past_key_values=((), ()))


def test_static_buffers_that_do_not_fit(model):
    wide = torch.empty(10, 2 * tiny.HIDDEN)
    with pytest.raises(BindError, match=r"out has shape \[10, 32\]; post\.1, embed needs \[rows, 64\]"):
        bind(model, "post.1, embed", out=torch.empty(10, 32))
    with pytest.raises(BindError, match="needs target_out too"):
        bind(model, "post.1, embed", out=wide, target=True)
    with pytest.raises(BindError, match="no target for target_out"):
        bind(model, "post.1, embed", out=wide, target_out=torch.empty(10, 32))
    with pytest.raises(BindError, match="target_out is given without out"):
        bind(model, "post.1, embed", target=True, target_out=torch.empty(10, 32))
    with pytest.raises(BindError, match=r"dtype=torch\.float16 disagrees with out"):
        bind(model, "post.1, embed", out=wide, dtype=torch.float16)
    with pytest.raises(BindError, match="requires grad"):
        bind(model, "post.1, embed", out=wide.clone().requires_grad_())
    with pytest.raises(BindError, match=r"that of out:model\.layers\.0\.mlp shows only on running"):
        bind(model, "out:model.layers.0.mlp", out=wide)


def test_a_request_that_does_not_exist(model):
    with torch.no_grad(), bind(model, "post.1") as capture:
        model(IDS)
    with pytest.raises(CaptureError, match="no request 1: this session holds requests 0 to 0"):
        capture.states.sequence(1)
