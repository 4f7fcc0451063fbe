"""Prompts under way: each answered once, never more tokens than the room, a failure ends it."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.launch.prompts import BATCHES, in_flight


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 20), max_size=25), batch=st.integers(1, 10))
def test_each_comes_once_and_no_more_run_than_there_is_room_for(lengths, batch):
    lock, running, most = threading.Lock(), [], []

    def run(number, sequence):
        with lock:
            running.append(len(sequence))
            most.append((sum(running), len(running)))
        time.sleep(0.0005)
        with lock:
            running.remove(len(sequence))
        return len(sequence)

    found = list(in_flight(run, [[0] * length for length in lengths], batch))
    assert sorted(found) == list(enumerate(lengths))
    assert all(tokens <= BATCHES * batch or alone == 1 for tokens, alone in most)


def test_a_failure_is_raised_and_what_has_not_begun_is_left_out():
    begun = []

    def run(number, sequence):
        begun.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        list(in_flight(run, [[0] * 9] * 50, 3))
    assert begun == [0]
