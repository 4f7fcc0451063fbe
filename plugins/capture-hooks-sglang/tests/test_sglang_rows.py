"""Rows told from what a ``ForwardBatch`` keeps on the host, for every forward mode."""

from types import SimpleNamespace

import pytest
import torch
from capture_hooks_sglang.forward import rows_of


def batch(mode, **fields):
    defaults = {"rids": ["a", "b"], "seq_lens_cpu": None, "seq_lens": torch.tensor([8, 4]), "spec_info": None}
    defaults |= {"extend_seq_lens_cpu": None, "extend_prefix_lens_cpu": None}
    return SimpleNamespace(forward_mode=SimpleNamespace(name=mode), **{**defaults, **fields})


def told(mode, **fields):
    return rows_of((None, None), {"forward_batch": batch(mode, **fields)})


@pytest.mark.parametrize("mode", ["EXTEND", "MIXED"])
def test_an_extension_begins_behind_its_prefix(mode):
    # Mixed batches carry decoding requests as extensions by one token.
    rows = told(mode, extend_seq_lens_cpu=[5, 1], extend_prefix_lens_cpu=[3, 9])
    assert (rows.requests, rows.lengths, rows.starts) == (("a", "b"), (5, 1), (3, 9))


def test_decoding_gives_the_last_position():
    rows = told("DECODE", seq_lens_cpu=torch.tensor([8, 4]))
    assert (rows.lengths, rows.starts) == ((1, 1), (7, 3))


def test_lengths_that_only_the_device_has_stay_a_tensor():
    rows = told("DECODE")
    assert isinstance(rows.starts, torch.Tensor)
    assert rows.starts.tolist() == [7, 3]


def test_padded_requests_of_a_graph_are_left_out():
    rows = told("DECODE", seq_lens_cpu=torch.tensor([8, 4, 1, 1]))
    assert (len(rows.lengths), rows.starts) == (2, (7, 3))


def test_verifying_a_chain_goes_on_behind_the_sequence():
    rows = told(
        "TARGET_VERIFY",
        seq_lens_cpu=torch.tensor([8, 4]),
        spec_info=SimpleNamespace(draft_token_num=3, topk=1),
    )
    assert (rows.lengths, rows.starts) == ((3, 3), (8, 4))


def test_an_idle_rank_has_no_rows():
    assert told("IDLE", rids=None) == rows_of((), {"forward_batch": batch("IDLE")})
    assert told("IDLE").requests == ()


@pytest.mark.parametrize(
    ("mode", "fields", "why"),
    [
        ("TARGET_VERIFY", {"spec_info": SimpleNamespace(draft_token_num=4, topk=2)}, "a tree of drafts"),
        ("TARGET_VERIFY", {"spec_info": SimpleNamespace()}, "a tree of drafts"),
        ("EXTEND", {}, "without extend_seq_lens_cpu"),
        ("DECODE", {"rids": None}, "mode DECODE carries no request ids"),
        ("DRAFT_EXTEND_V2", {}, "forward mode DRAFT_EXTEND_V2"),
        ("PREBUILT", {}, "forward mode PREBUILT"),
        ("SPLIT_PREFILL", {}, "forward mode SPLIT_PREFILL"),
        ("DLLM_EXTEND", {}, "forward mode DLLM_EXTEND"),
        ("SOMETHING_NEW", {}, "forward mode SOMETHING_NEW"),
    ],
)
def test_what_cannot_be_told_says_why(mode, fields, why):
    rows = told(mode, **fields)
    assert why in rows.unknown
    assert rows.requests == ()


def test_a_decoder_without_a_batch_says_so():
    assert "without a ForwardBatch" in rows_of((torch.zeros(2),), {}).unknown
