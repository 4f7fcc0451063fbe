import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.training.optimizers import Progress, ProgressLR, curve

quick = settings(max_examples=100, deadline=None)
shapes = st.sampled_from(["cosine", "linear", "constant"])


@quick
@given(st.floats(0, 1), shapes, st.floats(0, 0.9), st.floats(0, 0.9))
def test_the_rate_lies_between_zero_and_the_peak(progress, shape, warmup, minimum):
    value = curve(progress, shape, warmup, minimum)
    assert 0 <= value <= 1
    if progress >= warmup:
        assert value >= minimum


@quick
@given(shapes, st.floats(0.01, 0.5), st.floats(0, 0.9))
def test_it_rises_to_the_peak_and_ends_at_the_minimum(shape, warmup, minimum):
    assert curve(warmup, shape, warmup, minimum) == pytest.approx(1)
    assert curve(1, shape, warmup, minimum) == pytest.approx(1 if shape == "constant" else minimum)
    rising = [curve(warmup * i / 10, shape, warmup, minimum) for i in range(11)]
    falling = [curve(warmup + (1 - warmup) * i / 10, shape, warmup, minimum) for i in range(11)]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


class Ticks:
    """A clock that moves by a second whenever it is read."""

    def __init__(self, seconds=1.0):
        self.time, self.seconds = 0.0, seconds

    def __call__(self):
        self.time += self.seconds
        return self.time


@quick
@given(st.integers(1, 50), st.floats(1, 100), st.floats(0.1, 5))
def test_progress_is_the_further_of_steps_and_time(steps, budget, tick):
    progress = Progress(steps, budget, Ticks(tick))
    progress.start(0, 0.0)
    last = 0.0
    for step in range(1, steps + 1):
        progress.advance()
        assert progress.elapsed == pytest.approx(step * tick)
        assert progress.fraction == pytest.approx(min(max(step / steps, step * tick / budget), 1))
        assert progress.fraction >= last
        last = progress.fraction
    assert last == 1.0


def run(steps, resume_at=None):
    """Learning rates of a timed run, optionally stopped and continued from its state."""
    rates = []

    def start():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
        progress = Progress(None, 10.0, Ticks())
        progress.start(0, 0.0)
        return ProgressLR(optimizer, progress, lambda p: curve(p, "cosine", 0.1, 0.0))

    scheduler = start()
    for step in range(steps):
        if step == resume_at:
            state = scheduler.state_dict()
            scheduler = start()
            scheduler.load_state_dict(state)
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("at", range(1, 9))
def test_elapsed_time_is_part_of_the_state(at):
    assert run(9, resume_at=at) == run(9)


def test_a_timed_run_ends_near_zero():
    rates = run(10)
    assert max(rates) == pytest.approx(2.0, rel=0.05)
    assert rates[-1] < 0.1
