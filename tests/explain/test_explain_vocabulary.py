"""``d2t`` and ``t2d`` as explain judges them: by the reading that converting a head uses."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capture_hooks.errors import HeadError
from capture_hooks.heads.vocabulary import read_vocabulary
from capture_hooks.interop.explain import ExplainOptions, explain_head

V, D = 40, 10
LLAMA = ExplainOptions(family="llama", layers=12, written_for="sglang")
kept = st.lists(st.integers(0, V - 1), min_size=D, max_size=D, unique=True).map(sorted).map(torch.tensor)
MANY = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def marked(ids):
    mask = torch.zeros(V, dtype=torch.bool)
    mask[ids] = True
    return mask


def judged(raw_head, tmp_path, d2t, t2d):
    """Severity by check, of the vocabulary alone."""
    name = f"head-{len(list(tmp_path.iterdir()))}"
    head = raw_head(nested=[1, 5, 8], tensors={"d2t": d2t, "t2d": t2d}, name=name)
    found = explain_head(head, LLAMA).findings
    return {f.check: f.severity for f in found if f.check.startswith("vocabulary.")}


@given(kept)
@MANY
def test_offsets_that_t2d_confirms_are_right(raw_head, tmp_path, ids):
    assert judged(raw_head, tmp_path, ids - torch.arange(D), marked(ids)) == {}


@given(kept)
@MANY
def test_absolute_ids_that_t2d_confirms_are_wrong(raw_head, tmp_path, ids):
    """Though as offsets they may fit the vocabulary."""
    assert judged(raw_head, tmp_path, ids, marked(ids)) == {"vocabulary.absolute": "wrong"}


@given(kept)
@MANY
def test_zeros_are_lost_where_t2d_marks_other_tokens(raw_head, tmp_path, ids):
    first = torch.equal(ids, torch.arange(D))
    zeros = torch.zeros(D, dtype=torch.int64)
    right = {} if first else {"vocabulary.lost": "wrong"}
    assert judged(raw_head, tmp_path, zeros, marked(ids)) == right
    assert judged(raw_head, tmp_path, zeros, None) == {"vocabulary.identity": "warning"}


@given(
    st.lists(st.integers(-3, V), min_size=D, max_size=D).map(torch.tensor),
    st.one_of(st.none(), kept.map(marked)),
)
@MANY
def test_explain_and_convert_read_one_map(raw_head, tmp_path, d2t, t2d):
    """What converting refuses is not left without a finding, and what it takes for offsets has none wrong."""
    held = {"d2t": d2t} if t2d is None else {"d2t": d2t, "t2d": t2d}
    found = judged(raw_head, tmp_path, d2t, t2d)
    try:
        form = read_vocabulary(held, D, V, "head").form
    except HeadError:
        assert found
        return
    assert ("wrong" in found.values()) == (form == "absolute" or (form == "lost" and t2d is not None))


def test_an_empty_map_is_wrong(raw_head, tmp_path):
    empty = torch.zeros(0, dtype=torch.int64)
    assert judged(raw_head, tmp_path, empty, None) == {"vocabulary.d2t": "wrong"}
