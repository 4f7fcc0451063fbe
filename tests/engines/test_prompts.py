"""Prompts under way: each answered once, never more tokens than the room, a failure ends it."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.decoding.contract import Generated, PromptRequest
from capture_hooks.engines.prompts import BATCHES, DIALOGUES, converse, in_flight


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


class Talk:
    """As many prompts as asked for; each holds the answers before it."""

    def __init__(self, turns, known=0):
        self.turns, self.known, self.answers = turns, known, []

    @property
    def finished(self):
        return self.known == self.turns

    def asks(self):
        at = len(self.answers)
        return PromptRequest((self.turns, *self.answers), 1, at, at < self.known) if at < self.turns else None


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=2 * DIALOGUES))
def test_every_dialogue_is_led_to_its_end(shapes):
    talks = [Talk(turns, min(turns, known)) for turns, known in shapes]
    for answers in converse(lambda asked: Generated((sum(asked.prompt),), True), talks):
        for talk, answer in answers:
            talk.answers.append(answer.token_ids[0] if answer else 1)
    for talk in talks:
        wanted = [1] * talk.known
        while len(wanted) < talk.turns:
            wanted.append(talk.turns + sum(wanted))
        assert talk.answers == ([] if talk.finished else wanted)


def test_an_interrupt_does_not_wait_for_prompts_under_way():
    release = threading.Event()

    def run(number, sequence):
        if number:
            release.wait(60)

    found = in_flight(run, [[0]] * 3, 1)
    try:
        assert next(found) == (0, None)
        with pytest.raises(KeyboardInterrupt):
            found.throw(KeyboardInterrupt())
        assert not release.is_set()
    finally:
        release.set()


def test_an_error_does_not_wait_for_answers_under_way():
    asked, release = threading.Event(), threading.Event()

    def ask(_):
        asked.set()
        release.wait(60)
        return Generated((1,), True)

    def talks():
        yield Talk(1)
        asked.wait(60)
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            list(converse(ask, talks()))
        assert not release.is_set()
    finally:
        release.set()
