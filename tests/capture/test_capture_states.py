"""What is captured: the right values, in spec order, as an independent recomputation gives them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks import CaptureSpec, Point, bind
from capture_hooks.capture import find_anatomy
from capture_hooks.errors import CaptureError, SpecError
from capture_hooks.testing import strategies as own
from capture_hooks.testing import tiny


def recompute(model, ids):
    """Boundaries 0 … n and the normed end of a Llama, by calling its parts in order (no hooks)."""
    decoder = model.model
    length = ids.shape[1]
    stream = decoder.embed_tokens(ids)
    positions = torch.arange(length)[None]
    rotary = decoder.rotary_emb(stream, position_ids=positions)
    mask = torch.full((length, length), torch.finfo(stream.dtype).min).triu(1)[None, None]
    boundaries = [stream]
    for layer in decoder.layers:
        stream = layer(stream, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        boundaries.append(stream)
    return boundaries, decoder.norm(stream)


def expected(point, boundaries, normed, n):
    site = point.resolve(n)
    return (normed if site.norm else boundaries[site.boundary]).flatten(0, 1)


@given(data=st.data(), n=st.integers(1, 4), batch=st.integers(1, 3), length=st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_captured_states_are_the_recomputed_ones(data, n, batch, length):
    model = tiny.llama(num_hidden_layers=n)
    spec = data.draw(own.specs(n, modules=False))
    ids = torch.randint(3, tiny.VOCAB, (batch, length))
    with torch.no_grad(), bind(model, spec, target=True) as capture:
        model(input_ids=ids, use_cache=False)
    with torch.no_grad():
        boundaries, normed = recompute(model, ids)
    states = capture.states
    assert states.packed.shape == (batch * length, len(spec) * tiny.HIDDEN)
    assert states.packed.is_contiguous()
    for point in spec.inputs:
        torch.testing.assert_close(
            states[point], expected(point, boundaries, normed, n), rtol=1e-5, atol=1e-5
        )
    torch.testing.assert_close(
        states.target, expected(spec.target, boundaries, normed, n), rtol=1e-5, atol=1e-5
    )
    assert states.request.tolist() == [b for b in range(batch) for _ in range(length)]
    assert states.position.tolist() == list(range(length)) * batch


@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_packed_is_the_single_points_side_by_side(data):
    n = 4
    model = tiny.llama(num_hidden_layers=n)
    spec = data.draw(own.specs(n, modules=False))
    ids = torch.randint(3, tiny.VOCAB, (2, 5))
    singles = []
    with torch.no_grad():
        with bind(model, spec) as together:
            model(ids)
        for point in spec.inputs:
            with bind(model, CaptureSpec((point,))) as alone:
                model(ids)
            singles.append(alone.states.packed)
    assert torch.equal(together.states.packed, torch.cat(singles, dim=1))


def test_leaving_a_layer_is_entering_the_next():
    model = tiny.llama(num_hidden_layers=5)
    ids = torch.randint(3, tiny.VOCAB, (2, 6))
    for k in range(4):
        with torch.no_grad(), bind(model, f"post.{k}") as leaving, bind(model, f"pre.{k + 1}") as entering:
            model(ids)
        assert torch.equal(leaving.states.packed, entering.states.packed)


def test_a_state_answers_to_all_its_names():
    model = tiny.llama()
    with torch.no_grad(), bind(model, "post.2, embed", target=True) as capture:
        model(torch.randint(3, tiny.VOCAB, (1, 4)))
    states = capture.states
    for name in ("post.2", "pre.3", "post.-4", Point.pre(3)):
        assert torch.equal(states[name], states.packed[:, : tiny.HIDDEN])
    assert torch.equal(states["pre.0"], states["embed"])
    assert torch.equal(states["final_norm"], states.target)
    with pytest.raises(CaptureError, match=r"post\.4 was not captured; this session holds post\.2, embed"):
        states["post.4"]
    with pytest.raises(SpecError, match="outside a model of 6 layers"):
        states["post.6"]


def test_a_target_among_the_inputs_is_captured_once():
    model = tiny.llama()
    with torch.no_grad(), bind(model, "post.1, post.3 -> pre.4", target=True) as capture:
        model(torch.randint(3, tiny.VOCAB, (1, 4)))
    states = capture.states
    assert states.target.data_ptr() == states["post.3"].data_ptr()
    assert sum(len(layer._forward_hooks) for layer in model.model.layers) == 0


def test_a_target_not_asked_for_is_an_error():
    model = tiny.llama()
    with torch.no_grad(), bind(model, "post.1") as capture:
        model(torch.tensor([[5]]))
    assert not capture.states.has_target
    with pytest.raises(CaptureError, match=r"final_norm was not captured: bind\(model, spec, target=True\)"):
        _ = capture.states.target


def test_modules_of_other_widths_have_their_own_columns():
    model = tiny.llama(num_hidden_layers=2)
    layer = model.model.layers[1]
    seen = {}
    handles = [
        layer.mlp.gate_proj.register_forward_hook(lambda m, a, o: seen.update(gate=o.clone())),
        layer.mlp.register_forward_hook(lambda m, a, o: seen.update(mlp=o.clone())),
        model.lm_head.register_forward_hook(lambda m, a, o: seen.update(logits=o.clone())),
    ]
    spec = (
        "out:model.layers.1.mlp.gate_proj, post.0, out:lm_head, "
        "in:model.layers.1.mlp.down_proj, out:model.layers.1.mlp"
    )
    ids = torch.randint(3, tiny.VOCAB, (2, 3))
    with torch.no_grad(), bind(model, spec) as capture:
        model(ids)  # the width of the last one is not known yet
        model(ids)
    for handle in handles:
        handle.remove()
    states = capture.states
    inner = layer.mlp.gate_proj.out_features
    widths = [columns.stop - columns.start for columns in states.columns.values()]
    assert widths == [inner, tiny.HIDDEN, tiny.VOCAB, inner, tiny.HIDDEN]
    for half in (slice(0, 6), slice(6, 12)):
        assert torch.equal(states["out:model.layers.1.mlp.gate_proj"][half], seen["gate"].flatten(0, 1))
        assert torch.equal(states["out:model.layers.1.mlp"][half], seen["mlp"].flatten(0, 1))
        assert torch.equal(states["out:lm_head"][half], seen["logits"].flatten(0, 1))


def test_the_dtype_can_be_chosen_and_is_otherwise_the_models():
    model = tiny.llama().to(torch.bfloat16)
    ids = torch.randint(3, tiny.VOCAB, (1, 4))
    with torch.no_grad():
        with bind(model, "post.2", target=True) as own_dtype:
            model(ids)
        with bind(model, "post.2", target=True, dtype=torch.float32) as wide:
            model(ids)
    assert own_dtype.states.packed.dtype is torch.bfloat16
    assert wide.states.packed.dtype is wide.states.target.dtype is torch.float32
    assert torch.equal(wide.states.packed, own_dtype.states.packed.float())


def test_states_that_differ_in_dtype_need_a_choice():
    model = tiny.llama()
    model.model.layers[3].register_forward_hook(lambda m, a, o: o.double())
    model.model.layers[4].register_forward_pre_hook(lambda m, a: (a[0].float(), *a[1:]))
    ids = torch.randint(3, tiny.VOCAB, (1, 4))
    wrong = pytest.raises(CaptureError, match=r"post\.3 .*float64 .*float32; say which to keep")
    with torch.no_grad(), bind(model, "post.1, post.3"), wrong:
        model(ids)
    with torch.no_grad(), bind(model, "post.1, post.3", dtype=torch.float64) as capture:
        model(ids)
    assert capture.states.packed.dtype is torch.float64


def test_no_graph_is_kept_and_gradients_still_flow():
    model = tiny.llama()
    with bind(model, "embed, post.2") as capture:
        loss = model(torch.randint(3, tiny.VOCAB, (1, 4))).logits.sum()
    assert not capture.states.packed.requires_grad
    loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None


def test_states_from_inference_mode_can_be_trained_on():
    model = tiny.llama()
    with torch.inference_mode(), bind(model, "post.2", target=True) as capture:
        model(torch.randint(3, tiny.VOCAB, (1, 4)))
    weight = torch.ones(tiny.HIDDEN, requires_grad=True)
    ((capture.states.packed * weight).sum() + (capture.states.target * weight).sum()).backward()
    assert weight.grad is not None


def test_later_changes_in_place_do_not_reach_the_states():
    model = tiny.llama()
    before = []

    def spoil(module, args, output):
        args[0].zero_()

    model.model.layers[2].register_forward_hook(lambda m, a, output: before.append(output.clone()))
    model.model.layers[3].register_forward_hook(spoil)
    with torch.no_grad(), bind(model, "post.2") as capture:
        model(torch.randint(3, tiny.VOCAB, (1, 4)))
    assert torch.equal(capture.states.packed, before[0][0])


def test_nothing_but_the_requested_numbers_is_retained():
    model = tiny.llama()
    with torch.no_grad(), bind(model, "post.1, post.2, post.4", target=True) as capture:
        model(torch.randint(3, tiny.VOCAB, (2, 8)))
        one = capture.states
        assert one.packed.untyped_storage().nbytes() == 16 * 3 * tiny.HIDDEN * 4
        assert one.target.untyped_storage().nbytes() == 16 * tiny.HIDDEN * 4
        model(torch.randint(3, tiny.VOCAB, (1, 8)))
    assert capture.states.packed.untyped_storage().nbytes() == 24 * 3 * tiny.HIDDEN * 4


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_a_state_that_is_not_finite_is_named(value, word):
    model = tiny.llama()

    def spoil(module, args, output):
        output = output.clone()
        output[1, 2, 3] = value
        return output

    model.model.layers[3].register_forward_hook(spoil)
    with torch.no_grad(), bind(model, "post.1, post.3") as capture:
        model(torch.randint(3, tiny.VOCAB, (2, 4)))
    with pytest.raises(CaptureError, match=rf"post\.3 holds {word} at request 1, position 2; 1 of 8 rows"):
        capture.states.check_finite()
    with torch.no_grad(), bind(model, "post.1, post.2") as capture:
        model(torch.randint(3, tiny.VOCAB, (2, 4)))
    capture.states.check_finite()


def test_the_spec_of_the_result_has_absolute_layers():
    model = tiny.llama()
    with torch.no_grad(), bind(model, "post.-1, embed") as capture:
        model(torch.tensor([[5]]))
    assert str(capture.states.spec) == str(capture.spec) == "post.5, embed"
    assert capture.anatomy.n_layers == find_anatomy(model).n_layers == 6
