"""Draft trees and their verification in ``sgl-kernel-cpu`` against trees spelt out node by node."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel_cpu import tree, verify

quick = settings(max_examples=60, deadline=None)


@dataclass(frozen=True, slots=True)
class Drafted:
    """One request: what the draft proposed, what was selected, and the tree that this means."""

    group_parents: list[int]  # the candidate under which each group of top-k candidates was drafted
    selected: list[int]
    parents: list[int | None]  # of every node, by node; None for the root

    def path(self, node):
        """From a node up, the root left out."""
        steps = []
        while node:
            steps.append(node)
            node = self.parents[node]
        return steps

    def children(self, node):
        return [child for child, parent in enumerate(self.parents) if parent == node and child]


@st.composite
def drafted(draw, topk, steps, size):
    """EAGLE's way: a first top-k under the root, then top-k under each of top-k of the step before."""
    group_parents, before = [-1], list(range(topk))
    for step in range(1, steps):
        chosen = before if step == 1 else draw(st.permutations(before))[:topk]
        first = topk * len(group_parents)
        group_parents += chosen
        before = list(range(first, first + topk * topk))
    selected = []
    while len(selected) < size - 1:  # a candidate may be selected once its parent is
        open_ = [
            candidate
            for candidate in range(topk * len(group_parents))
            if candidate not in selected
            and (candidate < topk or group_parents[candidate // topk] in selected)
        ]
        selected.append(draw(st.sampled_from(open_)))
    selected.sort()
    parents = [None]
    for candidate in selected:
        parent = group_parents[candidate // topk]
        parents.append(0 if candidate < topk else selected.index(parent) + 1)
    return Drafted(group_parents, selected, parents)


@st.composite
def batches(draw):
    topk, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = min(40, 1 + topk + (steps - 1) * topk * topk)
    edges = [size for size in (8, 9, 16, 17, 32, 33) if size <= most]  # of packed masks
    size = draw(st.sampled_from(edges) | st.integers(1, most) if edges else st.integers(1, most))
    trees = draw(st.lists(drafted(topk, steps, size), min_size=1, max_size=3))
    lengths = [draw(st.integers(0, 9)) for _ in trees]
    return topk, steps, size, trees, lengths


def build(topk, steps, size, trees, lengths, mode, mask, dtype=torch.int64):
    """Positions, index, first child and next sibling, as lists; ``mask`` is written."""
    parents = torch.tensor([each.group_parents for each in trees], dtype=dtype)
    if steps == 1:  # as SGLang passes it
        parents = torch.empty(len(trees), 0, dtype=dtype)
    selected = torch.tensor([each.selected for each in trees], dtype=dtype).view(len(trees), size - 1)
    links = torch.full((3, len(trees), size), -1, dtype=dtype)
    positions = torch.empty(len(trees) * size, dtype=dtype)
    arguments = (parents, selected, torch.tensor(lengths, dtype=dtype), mask, positions, *links)
    tree.build_tree_kernel_efficient_cpu(*arguments, topk, steps, size, mode)
    return positions.tolist(), *links.tolist()


def check_links(trees, size, lengths, positions, index, first_child, next_sibling):
    for b, drafted_ in enumerate(trees):
        assert index[b] == [b * size + node for node in range(size)]
        for node in range(size):
            children = drafted_.children(node)
            assert positions[b * size + node] == lengths[b] + len(drafted_.path(node))
            assert first_child[b][node] == (children or [-1])[0]
            for child, after in pairwise([*children, -1]):
                assert next_sibling[b][child] == after
        assert next_sibling[b][0] == -1


@quick
@given(batches(), st.sampled_from([torch.int32, torch.int64]))
def test_trees_of_candidates(batch, dtype):
    *_, size, trees, lengths = batch
    mask = torch.ones(len(trees) * size * size, dtype=torch.bool)
    links = build(*batch, tree.QLEN_ONLY, mask, dtype)
    check_links(trees, size, lengths, *links)
    for b, rows in enumerate(mask.view(len(trees), size, size).tolist()):
        for node, row in enumerate(rows):
            assert row == [other in {0, *trees[b].path(node)} for other in range(size)]


@quick
@given(batches())
def test_layouts_of_the_mask(batch):
    *_, size, trees, lengths = batch
    square = torch.ones(len(trees), size, size, dtype=torch.bool)
    build(*batch, tree.QLEN_ONLY, square.view(-1))

    full = torch.ones(sum(size * (length + size) for length in lengths), dtype=torch.bool)
    build(*batch, tree.FULL_MASK, full)
    cells = iter(full.tolist())
    for b, length in enumerate(lengths):
        for node in range(size):
            row = [next(cells) for _ in range(length + size)]
            assert row == [True] * length + square[b, node].tolist()

    bits = next(bits for bits in (8, 16, 32, 64) if bits >= size)
    packed = torch.zeros(len(trees) * size, dtype={8: torch.uint8, 16: torch.uint16}.get(bits, torch.uint32))
    if bits == 64:
        with pytest.raises(ValueError, match=f"32 bits at most, not the {size}"):
            build(*batch, tree.QLEN_ONLY_BITPACKING, packed)
    else:
        build(*batch, tree.QLEN_ONLY_BITPACKING, packed)
        rows = square.view(-1, size).tolist()
        assert packed.tolist() == [sum(1 << node for node, seen in enumerate(row) if seen) for row in rows]


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="tree_mask_mode 3"):
        build(1, 1, 2, [Drafted([-1], [0], [None, 0])], [4], 3, torch.ones(4, dtype=torch.bool))


def test_a_node_without_its_parent_is_linked_to_nothing():
    # Candidate 6 was drafted under candidate 1, which was not selected.
    orphan = Drafted([-1, 0, 1], [0, 3, 6], [])
    mask = torch.ones(16, dtype=torch.bool)
    positions, _, first_child, next_sibling = build(3, 2, 4, [orphan], [10], tree.QLEN_ONLY, mask)
    assert first_child == [[1, 2, -1, -1]]
    assert next_sibling == [[-1] * 4]
    assert positions == [10, 11, 12, 11]
    assert mask.view(4, 4).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]


@quick
@given(batches())
def test_trees_of_masks(batch):
    *_, size, trees, lengths = batch
    mask = [
        [other in {0, *each.path(node)} for other in range(size)] for each in trees for node in range(size)
    ]
    links = torch.full((3, len(trees), size), 99)
    positions = torch.full((len(trees) * size,), 99)
    tree.reconstruct_indices_from_tree_mask(
        torch.tensor(mask).flatten(), torch.tensor(lengths), positions, *links, len(trees), size
    )
    check_links(trees, size, lengths, positions.tolist(), *links.tolist())


@quick
@given(batches(), st.data())
def test_the_accepted_path_is_the_targets_own(batch, data):
    _, steps, size, trees, _ = batch
    _, index, first_child, next_sibling = build(
        *batch, tree.QLEN_ONLY, torch.ones(len(trees) * size**2, dtype=torch.bool)
    )
    token = st.integers(0, 2)  # few, so that drafts are often right, and twice
    rows = st.lists(st.lists(token, min_size=size, max_size=size), min_size=len(trees), max_size=len(trees))
    tokens, chosen = data.draw(rows), data.draw(rows)
    width = data.draw(st.integers(1, steps + 1))
    predicts = torch.full((len(trees) * size,), -5, dtype=torch.int32)
    accept_index = torch.full((len(trees), width), -1, dtype=torch.int32)
    accepted = torch.full((len(trees),), -5, dtype=torch.int32)
    verify.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=accepted,
        candidates=torch.tensor(tokens),
        retrive_index=torch.tensor(index),
        retrive_next_token=torch.tensor(first_child),
        retrive_next_sibling=torch.tensor(next_sibling),
        target_predict=torch.tensor(chosen),
    )
    expected = [-5] * len(predicts)
    for b, each in enumerate(trees):
        path = [0]
        while len(path) < width:
            right = [child for child in each.children(path[-1]) if tokens[b][child] == chosen[b][path[-1]]]
            if not right:
                break
            path.append(right[0])
        for node in path:
            expected[b * size + node] = chosen[b][node]
        assert accept_index[b].tolist() == [b * size + node for node in path] + [-1] * (width - len(path))
        assert accepted[b] == len(path) - 1
    assert predicts.tolist() == expected
