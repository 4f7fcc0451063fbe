"""The witness, its file, and what it tells apart."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from capture_hooks.errors import CaptureError, HeadError
from capture_hooks.heads import files
from capture_hooks.heads.witness import Witness, check_witness, make_witness
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

SPEC = CaptureSpec.parse("post.3, embed, post.-1")
SEQUENCES = [[(7 * i * i + 3 * i + s) % 90 for i in range(20)] for s in range(4)]


@pytest.fixture(scope="module")
def model():
    return tiny.llama(num_hidden_layers=6)


@pytest.fixture(scope="module")
def witness(model):
    return make_witness(model, SPEC, SEQUENCES)


def test_it_holds_what_the_model_itself_computes(model, witness):
    assert witness.starts.tolist() == [0, 20, 40, 48]
    assert [str(p) for p in witness.spec.inputs] == ["post.3", "embed", "post.5"]
    last = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, a, out: last.append(out))
    expected = []
    for sequence in (SEQUENCES[0], SEQUENCES[1], SEQUENCES[2][:8]):
        with torch.no_grad():
            out = model.model(torch.tensor([sequence]), output_hidden_states=True, use_cache=False)
        end = last.pop()
        end = end[0] if isinstance(end, tuple) else end
        expected.append(torch.cat([out.hidden_states[4], out.hidden_states[0], end, out[0]], dim=-1)[0])
    hook.remove()
    torch.testing.assert_close(torch.cat([witness.inputs, witness.target], dim=1), torch.cat(expected))


def test_the_same_model_matches(model, witness):
    report = check_witness(model, witness)
    assert report.verdict == "matches"
    assert report.tokens == 45
    assert report.size < 1e-5
    assert [str(p.point) for p in report.points] == ["post.3", "embed", "post.5", "final_norm"]


def test_a_cast_drifts_and_other_weights_mismatch(model, witness):
    cast = check_witness(copy.deepcopy(model).bfloat16(), witness)
    other = check_witness(tiny.llama(num_hidden_layers=6, seed=1), witness)
    assert cast.verdict == "drift"
    assert 1e-3 < cast.size < 0.05
    assert other.verdict == "mismatch"
    assert "post.3" in str(other)
    assert str(cast).startswith("drift: relative difference from the witness over 45 tokens: post.3 0.0")


@given(st.integers(0, 47), st.sampled_from(["post.3", "embed", "post.5", "final_norm"]))
@settings(deadline=None, max_examples=30)
def test_one_wrong_row_shows_in_the_worst_token_unless_it_begins_a_sequence(witness, row, name):
    states = {point: state.clone() for point, state in witness.states.items()}
    states[name][row] *= 3
    report = witness.compare(states)
    worst = {str(p.point): p.worst for p in report.points}
    begins = row in (0, 20, 40)
    assert worst.pop(name) == pytest.approx(0 if begins else 2, rel=1e-6)
    assert set(worst.values()) == {0.0}
    assert report.verdict == "matches"  # the median is what decides


@pytest.mark.parametrize("swapped", [("post.3", "post.5"), ("embed", "post.3"), ("post.5", "final_norm")])
def test_permuted_slots_are_a_mismatch(witness, swapped):
    states = dict(witness.states)
    states[swapped[0]], states[swapped[1]] = states[swapped[1]], states[swapped[0]]
    assert witness.compare(states).verdict == "mismatch"


def test_a_huge_channel_does_not_hide_the_rest():
    ours, theirs = torch.randn(16, 8, generator=torch.manual_seed(0)), torch.randn(16, 8)
    ours[:, 0] = theirs[:, 0] = 1e4
    spec = CaptureSpec.parse("post.1 -> post.1")
    made = Witness(spec, torch.arange(16), torch.tensor([0, 16]), {"post.1": ours}, "by hand")
    assert made.compare({"post.1": theirs}).verdict == "mismatch"


def test_states_that_are_not_finite_are_a_mismatch(witness):
    states = {name: torch.full_like(state, torch.nan) for name, state in witness.states.items()}
    assert witness.compare(states).verdict == "mismatch"


def test_saved_and_loaded_it_is_bitwise_the_same(witness, tmp_path):
    path = tmp_path / "capture" / "witness.safetensors"
    witness.save(path)
    read = Witness.load(path)
    assert read.spec == witness.spec
    assert list(read.states) == list(witness.states)
    assert read.made_with == witness.made_with
    for name in witness.states:
        assert torch.equal(read.states[name], witness.states[name])
    assert torch.equal(read.token_ids, witness.token_ids)
    assert torch.equal(read.starts, witness.starts)
    assert files.read_header(path)[0]["order"] == "the spec's own order"


def test_the_model_is_left_as_it_was(model, witness):
    def hooks():  # transformers keeps some of its own
        return [(list(m._forward_hooks), list(m._forward_pre_hooks)) for m in model.modules()]

    before = hooks()
    model.model.layers[2].mlp.train()
    check_witness(model, witness)
    assert [m for m in model.modules() if m.training and not list(m.children())]
    assert not model.training
    assert model.model.layers[2].mlp.training
    model.eval()
    assert hooks() == before


def test_short_sequences_are_passed_over_and_too_few_refused(model):
    made = make_witness(model, SPEC, [[5], [], SEQUENCES[0]], tokens=12)
    assert made.starts.tolist() == [0, 12]
    with pytest.raises(HeadError, match=r"at least 4 tokens .* 2 sequences and tokens=48 give 2"):
        make_witness(model, SPEC, [[5, 6, 7], [9]])


def test_nan_states_make_no_witness(model):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(CaptureError, match=r"post\.3 holds NaN"):
        make_witness(broken, SPEC, SEQUENCES)


def test_a_smaller_vocabulary_is_named(witness):
    with pytest.raises(HeadError, match=r"the witness holds token id \d+; the target embeds 32 tokens"):
        check_witness(tiny.llama(num_hidden_layers=6, vocab_size=32), witness)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: m.update(format="9"), r"a witness of format '9'; this version reads '1'"),
        (lambda t, m: m.update(spec="post.x"), "is not a capture point"),
        (lambda t, m: t.pop("embed"), "its spec post.3, embed, post.5 asks for"),
        (lambda t, m: t.update(starts=torch.tensor([0, 30, 20, 48])), "do not cut 48 tokens into sequences"),
        (lambda t, m: t.update(embed=t["embed"][1:].clone()), "embed do not hold one row for each of 48"),
        (lambda t, m: t["embed"].fill_(torch.nan), "embed holds .* NaN or infinite"),
    ],
)
def test_damaged_files_are_one_line(witness, tmp_path, change, message):
    path = tmp_path / "witness.safetensors"
    witness.save(path)
    tensors, metadata = load_file(path), files.read_header(path)[0]
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(HeadError, match=message):
        Witness.load(path)


def test_states_of_another_shape_are_named(witness):
    states = dict(witness.states)
    del states["embed"]
    with pytest.raises(HeadError, match=r"holds embed with shape \[48, .*, and nothing was captured"):
        witness.compare(states)
