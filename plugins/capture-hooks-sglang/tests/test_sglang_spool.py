"""Requests put together from chunks: a file holds every row of one request in order, or there is none."""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from capture_hooks_sglang.serving.spool import Assembly, RequestRows, SpoolId
from hypothesis import given, settings
from hypothesis import strategies as st


def rows_of(key, start, end):
    """Rows that say whose they are, and which."""
    at = torch.arange(start, end)
    return RequestRows(
        (at + 1000.0 * key.number)[:, None].repeat(1, 6), -at[:, None].float(), at + 1000 * key.number
    )


def check_whole(directory, key):
    rows, expected = RequestRows.take(key.states_file(directory)), rows_of(key, 0, key.tokens)
    for name in RequestRows.__slots__:
        torch.testing.assert_close(getattr(rows, name), getattr(expected, name), rtol=0, atol=0)


@st.composite
def schedules(draw):
    """Chunks of several requests in any interleaving; some requests are retracted, some aborted, midway."""
    keys = [SpoolId(n, draw(st.integers(1, 9))) for n in range(draw(st.integers(1, 4)))]
    queues, aborted = [], set()
    for key in keys:
        steps = []
        for _ in range(draw(st.integers(0, 2))):  # runs that a retraction cut short
            steps += _chunks(draw, key, draw(st.integers(0, key.tokens - 1)))
        if draw(st.booleans()):
            steps += _chunks(draw, key, draw(st.integers(0, key.tokens - 1)))
            steps.append((key, None, None))
            aborted.add(key)
        else:
            steps += _chunks(draw, key, key.tokens)
        queues.append(steps)
    order = draw(st.permutations([n for n, steps in enumerate(queues) for _ in steps]))
    return keys, aborted, [queues[n].pop(0) for n in order]


def _chunks(draw, key, end):
    cuts = sorted(draw(st.sets(st.integers(1, end - 1)))) if end > 1 else []
    bounds = [0, *cuts, end] if end else [0]
    return [(key, a, b) for a, b in itertools.pairwise(bounds)]


@settings(deadline=None)  # threads and files
@given(schedules())
def test_files_hold_every_row_in_order_whatever_the_schedule(schedule):
    keys, aborted, steps = schedule
    with tempfile.TemporaryDirectory() as name:
        directory, assembly = Path(name), Assembly(Path(name))
        for key, start, end in steps:
            if start is None:
                assembly.forget(str(key))
            else:
                assembly.add(key, start, rows_of(key, start, end))
        assembly.wait()
        finished = set(keys) - aborted
        assert {path.name for path in directory.iterdir()} == {
            k.states_file(directory).name for k in finished
        }
        for key in finished:
            check_whole(directory, key)
        assert not assembly.unfinished


@pytest.mark.parametrize(
    ("first", "start", "end", "told"),
    [
        (0, 3, 8, "0 of its 8 tokens had been run when tokens 3 to 7 were"),  # a cached prefix
        (2, 5, 8, "2 of its 8 tokens had been run when tokens 5 to 7 were"),  # a chunk that was lost
        (4, 4, 9, "4 of its 8 tokens had been run when tokens 4 to 8 were"),  # more than it has
        (4, 3, 8, "4 of its 8 tokens had been run when tokens 3 to 7 were"),  # one row twice
    ],
)
def test_rows_that_do_not_continue_are_a_failure_that_says_so(tmp_path, first, start, end, told):
    assembly, key = Assembly(tmp_path), SpoolId(0, 8)
    if first:
        assembly.add(key, 0, rows_of(key, 0, first))
    assembly.add(key, start, rows_of(key, start, end))
    assembly.wait()
    assert told in key.failure_file(tmp_path).read_text()
    assert not key.states_file(tmp_path).exists()
    assert not assembly.unfinished


def test_a_disk_that_refuses_is_a_failure(tmp_path):
    spool = tmp_path / "spool"
    assembly, key = Assembly(spool), SpoolId(0, 2)
    assembly.add(key, 0, rows_of(key, 0, 2))  # the directory is not there, so not even words fit
    with pytest.raises(OSError, match="spool"):
        assembly.wait()


def test_ids_of_others_are_nobodys():
    assert SpoolId.parse(str(SpoolId(3, 70))) == SpoolId(3, 70)
    for other in (
        "",
        "HEALTH_CHECK_1",
        "capture-hooks-witness",
        "capture-hooks-dump-3",
        "x-capture-hooks-dump-3-7",
    ):
        assert SpoolId.parse(other) is None


def test_aborting_a_prefix_of_ids_leaves_the_others(tmp_path):
    assembly = Assembly(tmp_path)
    for key in (SpoolId(1, 9), SpoolId(2, 9)):
        assembly.add(key, 0, rows_of(key, 0, 4))
    assembly.forget("capture-hooks-dump-1-")
    assert assembly.unfinished == (SpoolId(2, 9),)
