"""Where captured states are written: one packed tensor per forward, in spec order, joined when asked for.

A state is copied once, inside its hook, so that nothing the model later does to its own tensors in
place can reach it.  Two kinds of state wait in a tensor of their own until they are packed: those on
another device than the packed one, and those of a first forward in which some width is not known yet.

One forward's packed tensor is handed out as it is.  Those of several forwards are joined once (and then
kept joined); consecutive rows of a static buffer are joined without a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..errors import CaptureError
from .anatomy import BatchRows
from .plan import Plan
from .rows import Forward, Group, untold
from .states import Phase, States

#: Stands for the view of a state in a forward for which no packed tensor could be made yet.
UNKNOWN = torch.empty(0)


class Widths:
    """Width of every tap, learnt at its first state where the module's class does not tell."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known = [tap.width for tap in plan.taps]
        #: Whether every width is known.
        self.complete = False
        #: Widths of the inputs in spec order, once all are known.
        self.inputs: list[int] = []
        #: Width of a target captured apart; None when there is none or it is unknown.
        self.target: int | None = None
        self._note()

    def learn(self, index: int, state: Tensor) -> None:
        """Take a state's width, or check it.

        Raises:
            CaptureError: when it is another than before.
        """
        width = state.shape[-1]
        known = self._known[index]
        if known is None:
            self._known[index] = width
            self._note()
        elif known != width:
            tap = self._plan.taps[index]
            raise CaptureError(
                f"{tap.point} ({tap.place.name}) gave a state of shape {list(state.shape)}: width {width} "
                f"where {known} was expected; this point is not of the stream's width in this model"
            )

    def _note(self) -> None:
        known, n = [w for w in self._known if w is not None], self._plan.n_inputs
        self.complete = len(known) == len(self._known)
        if self.complete:
            self.inputs, self.target = known[:n], known[n] if len(known) > n else None

    def columns(self) -> dict[str, slice]:
        """Columns of each input in the packed tensor."""
        at, columns = 0, {}
        for point, width in zip(self._plan.spec.inputs, self.inputs, strict=True):
            columns[str(point)] = slice(at, at + width)
            at += width
        return columns


@dataclass(frozen=True, slots=True)
class _Form:
    """What fresh memory looks like: tensors of one number each, expanded.

    Kept from forward to forward, since describing a tensor anew costs more than making it.
    """

    grid: tuple[int, ...]
    seen: torch.dtype
    packed: Tensor
    target: Tensor | None


class Allocator:
    """Makes the block of each forward, in fresh memory or in the caller's static buffers."""

    def __init__(
        self, plan: Plan, dtype: torch.dtype | None, out: Tensor | None, target_out: Tensor | None
    ) -> None:
        self.widths = Widths(plan)
        self._plan = plan
        self._dtype = dtype
        self._apart = len(plan.taps) > plan.n_inputs
        self._out = out
        self._target_out = target_out
        self._filled = 0
        self._form: _Form | None = None

    def renew(self) -> None:
        """The model may have moved or changed its dtype since the last forward."""
        self._form = None

    def reset(self) -> None:
        """The next forward goes to the start of the static buffers."""
        self._filled = 0

    def allot(self, forward: Forward, state: Tensor) -> list[Tensor | None]:
        """Give memory to a forward whose first captured state is ``state``; each tap's view of it.

        Raises:
            CaptureError: when the static buffer is too small, with both sizes.
        """
        if torch.is_inference_mode_enabled():
            # A tensor made in inference mode could never be saved for a backward pass, as in training.
            with torch.inference_mode(False):
                return self.allot(forward, state)
        if self._out is not None:
            forward.packed = self._static(self._out, forward, "out")
            if self._target_out is not None:
                forward.target = self._static(self._target_out, forward, "target_out")
        else:
            form = self._form
            if form is None or form.grid != forward.grid or form.seen is not state.dtype:
                if not self.widths.complete:
                    return [UNKNOWN] * len(self._plan.taps)
                self._form = form = self._new_form(forward, state)
            forward.packed = torch.empty_like(form.packed)
            if form.target is not None:
                forward.target = torch.empty_like(form.target)
        # "Unsafe" only for views of a tensor that needs grad; these never do.
        views: list[Tensor | None] = [*torch.unsafe_split_with_sizes(forward.packed, self.widths.inputs, -1)]
        if forward.target is not None:
            views.append(forward.target)
        return views

    def write(self, forward: Forward, index: int, state: Tensor, view: Tensor) -> None:
        """Put a state where it belongs, with all checks: the general form of ``view.copy_(state)``.

        Raises:
            CaptureError: rows, width or dtype other than expected.
        """
        tap = self._plan.taps[index]
        if state.shape[:-1].numel() != forward.lead.numel():
            raise CaptureError(
                f"{tap.point} ({tap.place.name}) gave a state of shape {list(state.shape)} in a forward of "
                f"{list(forward.lead)} tokens: {state.shape[:-1].numel()} rows where "
                f"{forward.lead.numel()} were expected"
            )
        self.widths.learn(index, state)
        rows = state.reshape(-1, state.shape[-1])
        elsewhere = view is not UNKNOWN and view.device != rows.device
        if view is UNKNOWN or elsewhere:
            # Waits on its own device until it is packed; cloned, as the model may write to it in place.
            kept = rows.clone() if forward.kept is None else rows[forward.kept.to(rows.device)]
            forward.loose = {**(forward.loose or {}), index: kept.to(self._dtype or kept.dtype)}
            return
        if self._dtype is None and self._out is None and view.dtype != rows.dtype:
            raise CaptureError(
                f"{tap.point} ({tap.place.name}) is {rows.dtype} but the states before it in this forward "
                f"are {view.dtype}; say which to keep: bind(..., dtype=torch.float32)"
            )
        if forward.kept is not None:
            rows = rows.index_select(0, forward.kept.to(rows.device))
        view.copy_(rows.view(view.shape))

    def commit(self, forward: Forward) -> None:
        """A forward is complete: in the static buffers the next one goes behind it."""
        self._filled += forward.rows

    def _new_form(self, forward: Forward, state: Tensor) -> _Form:
        dtype, widths = self._dtype or state.dtype, [sum(self.widths.inputs)]
        widths += [] if self.widths.target is None else [self.widths.target]
        one = torch.empty((), dtype=dtype, device=state.device)
        packed, target = (*(one.expand(*forward.grid, width) for width in widths), None)[:2]
        assert packed is not None
        return _Form(forward.grid, state.dtype, packed, target)

    def _static(self, buffer: Tensor, forward: Forward, name: str) -> Tensor:
        rows = forward.rows
        if self._filled + rows > buffer.shape[0]:
            raise CaptureError(
                f"{name} has {buffer.shape[0]} rows, {self._filled} of them filled, and this forward gives "
                f"{rows} more: {self._filled + rows} are needed (clear() starts again at row 0)"
            )
        return buffer.narrow(0, self._filled, rows).view(*forward.grid, buffer.shape[1])


PLACED = -1


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row of each tensor per token.

    ``base`` is how many tokens of its request the session missed; ``PLACED`` where the column, as the engine
    tells it, is the position.
    """

    packed: Tensor
    target: Tensor
    request: Tensor
    column: Tensor
    phase: Tensor
    base: Tensor

    def where(self, rows: Tensor) -> _Rows:
        return _Rows(*(tensor[rows.to(tensor.device)] for tensor in self._all()))

    @staticmethod
    def join(parts: Sequence[_Rows]) -> _Rows:
        if len(parts) == 1:
            return parts[0]
        return _Rows(*(_join(same) for same in zip(*(part._all() for part in parts), strict=True)))

    def _all(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]


class Pack:
    """Collects forwards in order."""

    def __init__(self, plan: Plan, allocator: Allocator) -> None:
        self._plan = plan
        self._allocator = allocator
        self._new: list[Forward] = []
        self._done: _Rows | None = None
        self._states: States | None = None
        self._requests = 0
        self._keys: dict[Hashable, tuple[int, int]] = {}  # number and length of an engine's requests

    @property
    def empty(self) -> bool:
        """Whether no forward was collected."""
        return not self._new and self._done is None

    def clear(self) -> None:
        """Drop all forwards collected so far, and number requests from 0 again."""
        self._new.clear()
        self._done = self._states = None
        self._requests = 0
        self._keys.clear()

    def add(self, forward: Forward) -> None:
        """Collect a completed forward."""
        self._new.append(forward)

    def states(self) -> States:
        """Everything collected, as one.

        Raises:
            CaptureError: points of several dtypes, and none was asked for.
        """
        if self._new or self._states is None:
            parts = [] if self._done is None else [self._done]
            for forward in self._new:
                if forward.told is not None:
                    parts = self._add_told(parts, forward, forward.told)
                    continue
                if forward.group is not None and forward.void_from is not None:
                    parts = [part.where(~_void(part, forward.group, forward.void_from)) for part in parts]
                parts.append(self._rows(forward))
            self._done = rows = _Rows.join(parts)
            self._new.clear()
            self._states = self._make(rows)
        return self._states

    def _number(self, forward: Forward) -> Group:
        """The forward's requests, numbered in the order in which they were first seen."""
        group = forward.group or Group(forward.batch, 0, forward.start)
        if group.first is None:
            group.first = self._requests
            self._requests += group.batch
        return group

    def _add_told(self, parts: list[_Rows], forward: Forward, told: BatchRows) -> list[_Rows]:
        """``parts`` and the rows of a forward whose engine tells them.

        A request that starts again at 0 is a new one; one that starts before its end was rolled back.

        Raises:
            CaptureError: rows that the engine could not tell.
        """
        if told.unknown is not None:
            raise CaptureError(untold(told))
        starts = told.starts.tolist() if isinstance(told.starts, Tensor) else list(told.starts)
        numbers = []
        for key, start, length in zip(told.requests, starts, told.lengths, strict=True):
            number, end = self._keys.get(key, (None, 0))
            if number is None or start == 0:
                number, self._requests = self._requests, self._requests + 1
            elif start < end:
                parts = [part.where((part.request != number) | (part.column < start)) for part in parts]
            self._keys[key] = number, start + length
            numbers.append(number)
        packed, target = self._packed(forward)
        if forward.padding is not None:
            packed, target = packed[: sum(told.lengths)], target[: sum(told.lengths)]
        lengths = torch.tensor(told.lengths, dtype=torch.int64)
        firsts = torch.tensor(starts, dtype=torch.int64).repeat_interleave(lengths)
        begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        decode = (torch.tensor(starts, dtype=torch.int64) > 0) & (lengths == 1)
        values = (
            torch.tensor(numbers, dtype=torch.int64).repeat_interleave(lengths),
            firsts + torch.arange(len(firsts)) - begins,
            torch.where(decode, Phase.DECODE, Phase.PREFILL).to(torch.int8).repeat_interleave(lengths),
            torch.full((len(firsts),), PLACED),
        )
        return [*parts, _Rows(packed, target, *(value.to(packed.device) for value in values))]

    def _make(self, rows: _Rows) -> States:
        columns, plan = self._allocator.widths.columns(), self._plan
        target = None
        if plan.target is not None:
            shared = plan.target < plan.n_inputs
            target = rows.packed[:, columns[str(plan.spec.inputs[plan.target])]] if shared else rows.target
        return States(
            spec=plan.spec,
            packed=rows.packed,
            request=rows.request,
            position=_positions(rows),
            phase=rows.phase,
            requests=self._requests,
            columns=columns,
            n_layers=plan.anatomy.n_layers,
            split_boundaries=plan.anatomy.split_boundaries,
            _target=target,
        )

    def _rows(self, forward: Forward) -> _Rows:
        group = self._number(forward)
        packed, target = self._packed(forward)
        device, n = packed.device, forward.lead.numel()
        cell = torch.arange(n, device=device) if forward.kept is None else forward.kept.to(device)
        request = cell // forward.length
        base = group.base[request.to(group.base.device)] if isinstance(group.base, Tensor) else group.base
        rows = _Rows(
            packed=packed,
            target=target,
            request=request + (group.first or 0),
            column=cell % forward.length + forward.start,
            phase=torch.full_like(cell, Phase.DECODE if forward.decode else Phase.PREFILL, dtype=torch.int8),
            base=torch.as_tensor(base, device=device).expand(len(cell)),
        )
        return rows if forward.padding is None else rows.where(forward.padding.reshape(-1))

    def _packed(self, forward: Forward) -> tuple[Tensor, Tensor]:
        """[n, W] inputs and [n, H] target (no columns where it is not captured apart)."""
        widths = self._allocator.widths
        n, inputs, columns = forward.rows, self._plan.n_inputs, list(widths.columns().values())
        packed, target, loose = forward.packed, forward.target, forward.loose or {}
        if packed is None:
            self._check_dtypes(loose)
            packed = loose[0].new_empty(n, columns[-1].stop)
        packed = packed.reshape(n, -1)
        if target is None:
            target = loose.get(inputs, packed[:, :0])
        target = target.reshape(n, -1)
        for index, state in loose.items():
            if index < inputs:
                packed[:, columns[index]] = state
            elif target is not state:
                target.copy_(state)
        return packed, target

    def _check_dtypes(self, loose: dict[int, Tensor]) -> None:
        dtypes = {str(self._plan.taps[i].point): s.dtype for i, s in loose.items() if i < self._plan.n_inputs}
        if len(set(dtypes.values())) > 1:
            seen = ", ".join(f"{point} {dtype}" for point, dtype in dtypes.items())
            raise CaptureError(
                f"the states differ in dtype ({seen}); say which to keep: bind(..., dtype=torch.float32)"
            )


def _void(rows: _Rows, group: Group, column: int) -> Tensor:
    assert group.first is not None  # numbered when its earlier rows were read
    own = (rows.request >= group.first) & (rows.request < group.first + group.batch)
    return own & (rows.column >= column)


def _positions(rows: _Rows) -> Tensor:
    """[N] how many real tokens of its request lie before each row: its rank by column, past the base."""
    order = torch.argsort(rows.column, stable=True)
    order = order[torch.argsort(rows.request[order], stable=True)]
    ordered = rows.request[order]
    index = torch.arange(len(ordered), device=ordered.device)
    first = torch.searchsorted(ordered, ordered)  # where each row's request begins in that order
    positions = torch.empty_like(index)
    positions[order] = index - first
    return torch.where(rows.base == PLACED, rows.column, positions + rows.base)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    head, total = tensors[0], sum(len(t) for t in tensors)
    end = head.data_ptr()
    for tensor in tensors:
        if not (tensor.is_contiguous() and tensor.data_ptr() == end and _one_storage(head, tensor)):
            return torch.cat(list(tensors))
        end += tensor.numel() * tensor.element_size()
    return head.as_strided((total, *head.shape[1:]), head.stride())


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
