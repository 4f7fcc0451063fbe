"""d2t and t2d against each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capture_hooks.errors import HeadError
from capture_hooks.heads.vocabulary import check_vocabulary

V = 40


def maps(ids):
    ids = torch.tensor(sorted(ids))
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}


@given(st.sets(st.integers(0, V - 1), min_size=1))
@settings(deadline=None, max_examples=60)
def test_offsets_name_the_ids(ids):
    assert check_vocabulary(maps(ids), len(ids), V, "here").tolist() == sorted(ids)


@given(st.sets(st.integers(0, V - 1), min_size=2, max_size=V - 1), st.integers(0, V - 1))
@settings(deadline=None, max_examples=60)
def test_any_flipped_bit_of_t2d_is_found(ids, at):
    tensors = maps(ids)
    tensors["t2d"][at] ^= True
    with pytest.raises(HeadError, match=rf"here: t2d marks \d+ ids.* and d2t names {len(ids)} ids"):
        check_vocabulary(tensors, len(ids), V, "here")


def test_a_whole_vocabulary_needs_no_map():
    assert check_vocabulary({}, V, V, "here").tolist() == list(range(V))
    with pytest.raises(HeadError, match="no d2t, and draft_vocab_size 8 differs from vocab_size 40"):
        check_vocabulary({}, 8, V, "here")


def test_absolute_ids_are_recognised():
    with pytest.raises(HeadError, match="outside a vocabulary of 40; these look like absolute ids"):
        check_vocabulary({"d2t": torch.tensor([3, 20, 39])}, 3, V, "here")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": torch.tensor([5, 2, 2])}, "draft ids 0 and 1 stand for 5 and 3"),
        ({"d2t": torch.tensor([-1, 0, 0])}, r"target ids -1\.\.2, outside a vocabulary of 40"),
        ({"d2t": torch.tensor([0, 0])}, r"d2t is \[2\] int64; draft_vocab_size 3 asks for \[3\]"),
        ({"d2t": torch.zeros(3)}, r"d2t is \[3\] float32"),
        (
            {"d2t": torch.zeros(3, dtype=torch.int64), "t2d": torch.ones(39, dtype=torch.bool)},
            r"t2d is \[39\] bool",
        ),
    ],
)
def test_bad_maps_are_one_line(tensors, message):
    with pytest.raises(HeadError, match=message) as caught:
        check_vocabulary(tensors, 3, V, "here")
    assert "\n" not in str(caught.value)
