"""Where captured states are written: straight into one packed tensor per forward, in spec order.

A state is copied once, inside its hook, so that nothing the model later does to its own tensors in
place can reach it.  Two kinds of state wait in a tensor of their own until they are packed: those on
another device than the packed one, and those of a first forward in which some width is not known yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CaptureError
from .plan import Plan
from .rows import Forward

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
            # A tensor made in inference mode could never be saved for a backward: training eats these.
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
