"""The verdict on what an engine delivered: right, right but noisy, or another state, named."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.errors import HeadError
from capture_hooks.heads import Witness
from capture_hooks.heads.fit import fit_wiring
from capture_hooks.spec import CaptureSpec, Point

LAYERS, TOKENS, HIDDEN = 7, 24, 16
NAMES = ["embed", *(f"post.{k}" for k in range(LAYERS))]


def stream(seed):
    """States of a residual stream: each boundary is the one before plus something, huge in one channel."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(LAYERS + 1, TOKENS, HIDDEN, generator=generator)
    parts[:, :, 3] *= 300
    return dict(zip(NAMES, parts.cumsum(0), strict=True))


def witness_of(states, points, starts=(0, 10, TOKENS)):
    spec = CaptureSpec.parse(", ".join(points))
    held = {str(p): states[str(p)] for p in spec.inputs} | {"final_norm": states["embed"]}
    return Witness(spec, torch.arange(TOKENS), torch.tensor(starts), held, "a test"), spec.inputs


def packed(states, points):
    return torch.cat([states[str(p)] for p in points], 1)


def computed_otherwise(states, noise, seed):
    """The same states in another precision."""
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: state * (1 + noise * torch.randn(state.shape, generator=generator))
        for name, state in states.items()
    }


seeds = st.integers(0, 999)
some = st.permutations(NAMES).map(lambda names: names[:3])


@settings(deadline=None)
@given(seed=seeds, points=some, noise=st.sampled_from([0.0, 1e-6, 1e-2, 0.1]))
def test_the_right_wiring_fits_whatever_the_precision(seed, points, noise):
    states = stream(seed)
    witness, inputs = witness_of(states, points)
    # One noise for each state, as one precision gives: what is delivered is what the engine holds.
    held = computed_otherwise(states, noise, seed)
    fit = fit_wiring(witness, inputs, packed(held, inputs), held)
    assert fit.verdict == ("matches" if noise <= 1e-6 else "drift")
    assert fit.size <= 3 * noise


@settings(deadline=None)
@given(seed=seeds, points=some, noise=st.sampled_from([0.0, 1e-2]), data=st.data())
def test_another_state_in_a_slot_is_named(seed, points, noise, data):
    states = stream(seed)
    witness, inputs = witness_of(states, points)
    held = computed_otherwise(states, noise, seed)
    slot = data.draw(st.integers(0, 2))
    other = data.draw(st.sampled_from([name for name in NAMES if name != points[slot]]))
    fed = [Point.parse(other) if i == slot else point for i, point in enumerate(inputs)]
    fit = fit_wiring(witness, inputs, packed(held, fed), held)
    assert fit.verdict == "mismatch"
    assert [s.slot for s in fit.slots if s.verdict == "mismatch"] == [slot]
    assert fit.slots[slot].holds == other
    assert fit.slots[slot].best == points[slot]
    assert f"slot {slot} should hold {points[slot]} and holds {other}" in str(fit)


@settings(deadline=None)
@given(seed=seeds, points=some)
def test_tokens_one_off_are_named(seed, points):
    states = stream(seed)
    witness, inputs = witness_of(states, points)
    late = {name: state.roll(1, 0) for name, state in states.items()}
    fit = fit_wiring(witness, inputs, packed(late, inputs), states)
    assert {slot.holds for slot in fit.slots} == {f"{point} of the token before" for point in points}


@settings(deadline=None)
@given(seed=seeds, points=some)
def test_an_engine_that_counts_otherwise_is_told_which_layer_fits(seed, points):
    """The engine's own ``post.k`` is the trainer's ``post.k-1``: delivered as asked, and still wrong."""
    states = stream(seed)
    points = [name for name in points if name not in ("embed", f"post.{LAYERS - 1}")] or ["post.1"]
    witness, inputs = witness_of(states, points)
    shifted = {f"post.{k + 1}": states[f"post.{k}"] for k in range(LAYERS - 1)} | {"post.0": states["embed"]}
    fit = fit_wiring(witness, inputs, packed(shifted, inputs), shifted)
    for slot, point in zip(fit.slots, inputs, strict=True):
        assert (slot.verdict, slot.best) == ("mismatch", f"post.{point.layer + 1}")
        assert slot.holds == str(point)


@settings(deadline=None)
@given(seed=seeds, points=some)
def test_other_weights_are_near_nothing(seed, points):
    witness, inputs = witness_of(stream(seed), points)
    other = stream(seed + 5000)
    fit = fit_wiring(witness, inputs, packed(other, inputs), other)
    assert fit.verdict == "mismatch"
    assert "no state of this model is near it: other target weights?" in str(fit)


@settings(deadline=None)
@given(
    seed=seeds,
    points=some,
    noise=st.sampled_from([0.0, 1e-2]),
    rows=st.sampled_from([slice(1, 10), slice(11, None, 3), slice(12, None)]),
    fault=st.sampled_from(["nan", "zero", "of another token"]),
)
def test_a_part_of_the_rows_cannot_hide_behind_the_median(seed, points, noise, rows, fault):
    """Such as the first chunk, the first row of each chain, or a second sequence."""
    states = stream(seed)
    witness, inputs = witness_of(states, points)
    held = computed_otherwise(states, noise, seed)
    delivered = packed(held, inputs)
    wrong = {"nan": torch.nan, "zero": 0.0, "of another token": delivered.roll(5, 0)[rows]}
    delivered[rows] = wrong[fault]
    fit = fit_wiring(witness, inputs, delivered, held)
    assert fit.verdict == "mismatch"
    assert "tokens" in str(fit)


@settings(deadline=None)
@given(seed=seeds, points=some)
def test_the_same_state_in_another_precision_is_no_other_wiring(seed, points):
    states = stream(seed)
    witness, inputs = witness_of(states, points)
    fit = fit_wiring(witness, inputs, packed(states, inputs).bfloat16(), states)
    assert fit.verdict == "drift"


@settings(deadline=None)
@given(seed=seeds, points=some, rows=st.lists(st.integers(0, TOKENS - 1), max_size=TOKENS, unique=True))
def test_only_the_rows_delivered_are_judged_and_firsts_are_left_out(seed, points, rows):
    states = stream(seed)
    witness, inputs = witness_of(states, points)
    delivered = packed(states, inputs)[rows]
    wrong_at_firsts = delivered.clone()
    for i, row in enumerate(rows):
        if row in (0, 10):
            wrong_at_firsts[i] = 1e6
    fit = fit_wiring(witness, inputs, wrong_at_firsts, states, torch.tensor(rows, dtype=torch.int64))
    told = len(set(rows) - {0, 10})
    assert fit.tokens == told
    assert fit.verdict == ("matches" if told >= 4 else "undetermined")


def test_a_shard_of_the_width_is_refused():
    states = stream(0)
    witness, inputs = witness_of(states, ["post.0", "post.2"])
    with pytest.raises(HeadError, match=r"eats 32 values for each of 24 tokens .* \[24, 16\] was delivered"):
        fit_wiring(witness, inputs, packed(states, inputs)[:, :16], states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"points": [Point.parse("post.5")]}, r"asked for: post\.5"),
        ({"points": []}, "asked for: nothing"),
        ({"rows": torch.arange(-1, TOKENS - 1)}, "rows -1 to 22 of a witness of 24"),
        ({"rows": torch.arange(1, TOKENS + 1)}, "rows 1 to 24"),
        ({"states": {"post.0": torch.zeros(3, HIDDEN)}}, "post.0: not one row for each"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, message):
    states = stream(0)
    witness, inputs = witness_of(states, ["post.0", "post.2"])
    given = {"points": inputs, "delivered": packed(states, inputs), "states": states, "rows": None} | change
    with pytest.raises(HeadError, match=message):
        fit_wiring(witness, **given)
