"""Where captured states are written: straight into one packed tensor per forward, in spec order.

A state is copied once, inside its hook, so that nothing the model later does to its own
tensors in place can reach it.  Only three kinds of state wait in a tensor of their own until they are packed:
those on another device than the packed one, and those of a first forward in which some width is not known yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CaptureError
from .plan import Plan
from .rows import Forward

#: Stands for the view of a state that is already there.
TAKEN = torch.empty(0)
#: Stands for the view of a state in a forward for which no packed tensor could be made yet.
UNKNOWN = torch.empty(0)


class Widths:
    """Width of every tap, learnt at its first state where the module's class does not tell."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known = [tap.width for tap in plan.taps]

    def learn(self, index: int, state: Tensor) -> None:
        """Take a state's width, or check it.

        Raises:
            CaptureError: when it is another than before.
        """
        width = state.shape[-1]
        known = self._known[index]
        if known is None:
            self._known[index] = width
        elif known != width:
            tap = self._plan.taps[index]
            raise CaptureError(
                f"{tap.point} ({tap.place.name}) gave a state of shape {list(state.shape)}: width {width} where "
                f"{known} was expected; this point is not of the stream's width in this model"
            )

    @property
    def inputs(self) -> list[int] | None:
        """Widths of the inputs in spec order; None while one is unknown."""
        known = [w for w in self._known[: self._plan.n_inputs] if w is not None]
        return known if len(known) == self._plan.n_inputs else None

    @property
    def target(self) -> int | None:
        """Width of a target captured apart; None when there is none or it is unknown."""
        return self._known[self._plan.n_inputs] if len(self._known) > self._plan.n_inputs else None

    def columns(self) -> dict[str, slice]:
        """Columns of each input in the packed tensor."""
        at, columns = 0, {}
        for point, width in zip(self._plan.spec.inputs, self.inputs or (), strict=True):
            columns[str(point)] = slice(at, at + width)
            at += width
        return columns


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

    def reset(self) -> None:
        """Write the next forward to the start of the static buffers."""
        self._filled = 0

    def allot(self, forward: Forward, state: Tensor) -> list[Tensor]:
        """Give memory to a forward whose first captured state is ``state``; each tap's view of it.

        Raises:
            CaptureError: when the static buffer is too small, with both sizes.
        """
        # A tensor made in inference mode could never be saved for a backward: training eats these.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self._views(forward, state)
        return self._views(forward, state)

    def write(self, forward: Forward, index: int, state: Tensor, view: Tensor) -> None:
        """Put a state where it belongs, with all checks: the general form of ``view.copy_(state)``.

        Raises:
            CaptureError: rows, width or dtype other than expected.
        """
        tap = self._plan.taps[index]
        if state.shape[:-1].numel() != forward.lead.numel():
            raise CaptureError(
                f"{tap.point} ({tap.place.name}) gave a state of shape {list(state.shape)} in a forward of "
                f"{list(forward.lead)} tokens: {state.shape[:-1].numel()} rows where {forward.lead.numel()} were expected"
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
                f"{tap.point} ({tap.place.name}) is {rows.dtype} but the states before it in this forward are "
                f"{view.dtype}; say which to keep: bind(..., dtype=torch.float32)"
            )
        if forward.kept is not None:
            rows = rows.index_select(0, forward.kept.to(rows.device))
        view.copy_(rows.view(view.shape))

    def commit(self, forward: Forward) -> None:
        """A forward is complete: in the static buffers the next one goes behind it."""
        if self._out is not None:
            self._filled += forward.rows

    def _views(self, forward: Forward, state: Tensor) -> list[Tensor]:
        widths, apart = self.widths.inputs, self.widths.target
        if widths is None or (self._apart and apart is None):
            return [UNKNOWN] * len(self._plan.taps)
        if self._out is not None:
            forward.packed = self._static(self._out, forward, "out")
            if self._target_out is not None:
                forward.target = self._static(self._target_out, forward, "target_out")
        else:
            forward.packed = self._fresh(forward.grid, sum(widths), state)
            if apart is not None:
                forward.target = self._fresh(forward.grid, apart, state)
        # "Unsafe" only for views of a tensor that needs grad; these never do.
        views = list(torch.unsafe_split_with_sizes(forward.packed, widths, -1))
        if forward.target is not None:
            views.append(forward.target)
        return views

    def _fresh(self, grid: tuple[int, ...], width: int, state: Tensor) -> Tensor:
        return torch.empty((*grid, width), dtype=self._dtype or state.dtype, device=state.device)

    def _static(self, buffer: Tensor, forward: Forward, name: str) -> Tensor:
        rows = forward.rows
        if self._filled + rows > buffer.shape[0]:
            raise CaptureError(
                f"{name} has {buffer.shape[0]} rows, {self._filled} of them filled, and this forward gives "
                f"{rows} more: {self._filled + rows} are needed (clear() starts again at row 0)"
            )
        return buffer.narrow(0, self._filled, rows).view(*forward.grid, buffer.shape[1])
