"""Request and token pools of ``sgl-kernel-cpu`` against one Python loop per cell."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel_cpu import pools

quick = settings(max_examples=60, deadline=None)

INTS = st.sampled_from([torch.int32, torch.int64])


@st.composite
def tables(draw, room=0):
    """A table of slots, distinct rows of it, and a range of columns per row that leaves ``room`` behind."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(room, room + 12))
    table = torch.arange(100, 100 + rows * width, dtype=torch.int32).view(rows, width)
    chosen = draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True))
    bounds = [
        sorted((draw(st.integers(0, width - room)), draw(st.integers(0, width - room)))) for _ in chosen
    ]
    dtype = draw(INTS)
    starts, ends = (torch.tensor(column, dtype=dtype) for column in zip(*bounds, strict=True))
    return table, torch.tensor(chosen, dtype=draw(INTS)), starts, ends


@quick
@given(tables())
def test_assigning_slots_and_reading_them_back(case):
    table, rows, starts, ends = case
    expected, new = table.clone(), 1000
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        for column in range(start, end):
            expected[row, column] = new
            new += 1
    slots = torch.arange(1000, new)
    pools.assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, table.shape[1])
    assert torch.equal(table, expected)

    out = torch.full((len(slots) + 2,), -7)
    pools.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, table.shape[1])
    assert out.tolist() == [*slots.tolist(), -7, -7]


@quick
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_draft_slots_and_the_rows_of_branches(topk, steps, data):
    table, rows, lengths, _ = data.draw(tables(room=topk * steps))
    width = table.shape[1]
    out = torch.full((len(rows) * topk * steps,), -7)
    pools.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, width, topk, steps)
    branches = pools.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, width)
    assert branches.dtype == table.dtype
    assert branches.shape == (len(rows) * topk, width)
    slots = iter(out.tolist())
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        cells = table[row].tolist()
        for branch in range(topk):
            own = [cells[length + branch * steps + step] for step in range(steps)]
            assert [next(slots) for _ in range(steps)] == own
            assert branches[i * topk + branch, : length + steps].tolist() == cells[:length] + own


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_rows_are_copied_in_every_buffer(widths, data):
    rows = data.draw(st.integers(1, 8))
    moves = data.draw(st.lists(st.integers(0, rows - 1), unique=True))
    sources = [data.draw(st.integers(0, rows - 1)) for _ in moves]
    buffers = [torch.randn(rows, width) for width in widths]
    expected = [buffer.clone() for buffer in buffers]
    for before, after in zip(buffers, expected, strict=True):
        for target, source in zip(moves, sources, strict=True):
            after[target] = before[source]
    pools.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in buffers]),
        torch.tensor(moves, dtype=torch.int64),
        torch.tensor(sources, dtype=torch.int64),
    )
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


@quick
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.booleans())
def test_the_bonus_is_the_last_accepted_token(accepted, flat):
    tokens = torch.arange(len(accepted) * 4, dtype=torch.int32).view(-1, 4)
    bonus = torch.full((len(accepted),), -1, dtype=torch.int32)
    lengths = torch.tensor(accepted, dtype=torch.int32)
    pools.fill_bonus_tokens_cpu(tokens.flatten() if flat else tokens, lengths, bonus, 4)
    assert bonus.tolist() == [tokens[i, n - 1].item() for i, n in enumerate(accepted)]


@quick
@given(st.lists(st.lists(st.integers(-1, 11), min_size=3, max_size=3), min_size=1, max_size=4), INTS)
def test_accepted_slots_are_packed(accepted, dtype):
    slots, out = torch.arange(50, 62), torch.full((3 * len(accepted),), -7)
    pools.fill_accept_out_cache_loc_cpu(torch.tensor(accepted, dtype=dtype), slots, out)
    packed = [50 + index for row in accepted for index in row if index >= 0]
    assert out.tolist() == packed + [-7] * (len(out) - len(packed))


@quick
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), INTS, INTS)
def test_ids_are_rotated(lengths, selected, starts_dtype, lengths_dtype):
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    ids = torch.arange(sum(lengths) + 1)
    expected = ids.tolist()
    select = [start + max(0, length - 2) for start, length in zip(starts, lengths, strict=True)]
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for at in range(start, start + length - 1):
            expected[at] = at + 1
        if length:
            expected[select[i] if selected else start + length - 1] = 900 + i
    pools.rotate_input_ids_cpu(
        ids,
        torch.tensor(starts, dtype=starts_dtype),
        torch.tensor(lengths, dtype=lengths_dtype),
        torch.arange(900, 900 + len(lengths)).unsqueeze(1),
        torch.tensor(select) if selected else None,
    )
    assert ids.tolist() == expected
