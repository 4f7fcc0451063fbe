"""Which rows of a packed batch have to be computed at which training-time-test step.

Row t at step j learns from target row ``r = t + 1 + j``, and whether it counts depends on r alone
(the mask of token r + 1).  A row is *active* at step j when it counts at step j or later: only
active rows ask, and only rows up to a sequence's last active one are context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Block, Queries


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one step.  All indices are into compacted lists, never into the whole batch.

    Attributes:
        rows: [A] active rows, as indices into the previous step's rows (step 0: into the context).
        queries: their positions and attention blocks against the context.
        rope: [A] RoPE positions ``t + j``.
        tokens: [A] (step 0: [C]) index into ``TrainingPlan.tokens`` of the token each row takes.
        query_tokens: index into ``TrainingPlan.query_tokens`` of the token of each row that asks in layer 0.
        counted: [L] the active rows that count at this step, ascending.
        bounds: for each chunk of target rows, where its rows start in ``counted`` (one more at the end).
    """

    rows: Tensor
    queries: Queries
    rope: Tensor
    tokens: Tensor
    query_tokens: Tensor
    counted: Tensor
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Rows of a whole batch.

    Attributes:
        context: [C] rows that serve as context; ``context_queries`` the same rows asking, which
            all do below the last layer; ``context_rope`` their positions.
        tokens: [E] rows whose token's embedding is used; ``query_tokens`` indexes those of rows that ask.
        targets: [R] rows that teach; ``last_step`` [R] the last step each can serve (its position less one).
        chunk: target rows per chunk of the loss.
        longest: upper bound of RoPE positions.
    """

    context: Tensor
    context_queries: Queries
    context_rope: Tensor
    tokens: Tensor
    query_tokens: Tensor
    targets: Tensor
    last_step: Tensor
    chunk: int
    steps: tuple[Step, ...]
    longest: int


def teaching_rows(loss_mask: Tensor, starts: Tensor) -> Tensor:
    """[N] bool: rows r whose next token counts and that some step-0 row (r - 1) learns from. On the CPU."""
    rows = torch.arange(loss_mask.shape[0])
    sequence = _sequence_of(starts)
    following = (rows + 1).clamp(max=max(loss_mask.shape[0] - 1, 0))
    return (rows > starts[sequence]) & (rows + 1 < starts[sequence + 1]) & loss_mask[following]


def rows_per_step(teaching: Tensor, starts: Tensor, steps: int) -> Tensor:
    """[J] how many of the teaching rows (indices, ascending) serve each step: row r serves steps below
    its position."""
    first = starts[torch.searchsorted(starts, teaching, right=True) - 1]
    served = (teaching - first).clamp(max=steps)
    return torch.tensor([int((served > j).sum()) for j in range(steps)])


def make_plan(
    teaching: Tensor,
    starts: Tensor,
    steps: int,
    device: torch.device,
    *,
    context_asks: bool,
    score_budget: int,
    chunk: int,
) -> TrainingPlan:
    """Lay out the rows for ``steps`` steps.

    Args:
        teaching: [N] bool on the CPU, a subset of `teaching_rows`.
        starts: [S+1] offsets on the CPU.
        steps: J.
        device: where the index tensors go.
        context_asks: whether every context row asks in layer 0 (there are layers above it).
        score_budget: rows times keys of one attention block.
        chunk: target rows per chunk of the loss.
    """
    count, sequence = teaching.shape[0], _sequence_of(starts)
    rows, first, end = torch.arange(count), starts[sequence], starts[sequence + 1]
    position = rows - first

    def ahead(flags: Tensor, distance: int) -> Tensor:
        """flags[t + distance], False past the end of t's sequence."""
        return flags[(rows + distance).clamp(max=max(count - 1, 0))] & (rows + distance < end)

    counted = [ahead(teaching, 1 + j) for j in range(steps)]
    active = list(counted)
    for j in reversed(range(steps - 1)):
        active[j] = active[j] | active[j + 1]
    last = torch.full((starts.shape[0] - 1,), -1).scatter_reduce_(
        0, sequence[active[0]], rows[active[0]], "amax"
    )
    context = rows <= last[sequence]

    eaten, eaten_by_queries = (
        torch.zeros(count + steps, dtype=torch.bool),
        torch.zeros(count + steps, dtype=torch.bool),
    )
    eaten[rows[context] + 1] = True
    asking_first = [context if context_asks else active[0], *active[1:]]
    for j in range(steps):
        eaten[rows[active[j]] + 1 + j] = True
        eaten_by_queries[rows[asking_first[j]] + 1 + j] = True

    context_rows, in_context = rows[context], _rank(context)
    in_tokens, in_query_tokens = _rank(eaten), _rank(eaten_by_queries)
    targets = rows[teaching]
    chunk_starts = [*targets[::chunk].tolist(), count]
    sizes = torch.bincount(sequence[context_rows], minlength=starts.shape[0] - 1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).tolist()

    def asking(asked: Tensor) -> Queries:
        return Queries(
            position[asked].to(device), _blocks(sequence[asked], position[asked], offsets, score_budget)
        )

    plans, previous = [], in_context
    for j in range(steps):
        now = rows[active[j]]
        here = _rank(active[j])
        counts = rows[counted[j]]
        bounds = torch.searchsorted(counts + 1 + j, torch.tensor(chunk_starts)).tolist()
        plans.append(
            Step(
                rows=previous[now].to(device),
                queries=asking(now),
                rope=(position[now] + j).to(device),
                tokens=in_tokens[(context_rows if j == 0 else now) + 1 + j].to(device),
                query_tokens=in_query_tokens[rows[asking_first[j]] + 1 + j].to(device),
                counted=here[counts].to(device),
                bounds=tuple(bounds),
            )
        )
        previous = here
    return TrainingPlan(
        context=context_rows.to(device),
        context_queries=asking(context_rows),
        context_rope=position[context_rows].to(device),
        tokens=eaten.nonzero().squeeze(1).to(device),
        query_tokens=in_tokens[eaten_by_queries.nonzero().squeeze(1)].to(device),
        targets=targets.to(device),
        last_step=(position[targets] - 1).to(device),
        chunk=chunk,
        steps=tuple(plans),
        longest=int(position.max()) + steps + 1 if count else steps,
    )


def _sequence_of(starts: Tensor) -> Tensor:
    """[N] the sequence of each row."""
    return torch.repeat_interleave(torch.arange(starts.shape[0] - 1), starts.diff())


def _rank(flags: Tensor) -> Tensor:
    """Where each flagged row lands when only flagged rows are kept."""
    return flags.long().cumsum(0) - 1


def _blocks(sequence: Tensor, position: Tensor, offsets: list[int], budget: int) -> tuple[Block, ...]:
    """Blocks of at most ``budget`` scores each; rows ascend, so a block's last row sees the furthest."""
    counts = torch.bincount(sequence, minlength=len(offsets) - 1).tolist()
    where = position.tolist()
    blocks, at = [], 0
    for index, number in enumerate(counts):
        end = at + number
        while at < end:
            size = max(1, min(end - at, budget // (where[end - 1] + 1)))
            blocks.append(Block(at, at + size, offsets[index], offsets[index] + where[at + size - 1] + 1))
            at += size
    return tuple(blocks)
