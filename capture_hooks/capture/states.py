"""Captured states: rows by token, columns by point.

Shapes: N tokens, W the sum of the points' widths (K*hidden when all lie on the stream), H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor

from ..errors import CaptureError
from ..spec import CaptureSpec, Point


class Phase(IntEnum):
    """What kind of forward a row was captured in."""

    #: Part of a prompt, or of any forward without a cache; also several tokens at once on a filled cache.
    PREFILL = 0
    #: One token per request on a cache that already held some.
    DECODE = 1


@dataclass(frozen=True, slots=True)
class States:
    """One row per token in the order of capture; `sequence` gives one request's rows by position.

    Attributes:
        spec: the points captured, layers non-negative.
        packed: [N, W] states, columns in spec order.
        request: [N] int64; requests are numbered from 0 in the order in which they were first seen.
        position: [N] int64 index of the row's token in its request, padding not counted.
        phase: [N] int8 of `Phase`.
        requests: how many requests there are.
        columns: the columns of each point, by its text.
    """

    spec: CaptureSpec
    packed: Tensor
    request: Tensor
    position: Tensor
    phase: Tensor
    requests: int
    columns: Mapping[str, slice]
    n_layers: int = field(repr=False)
    split_boundaries: frozenset[int] = field(repr=False, default=frozenset())
    _target: Tensor | None = field(repr=False, default=None)

    def __len__(self) -> int:
        return self.packed.shape[0]

    @property
    def target(self) -> Tensor:
        """[N, H] states at the spec's target point.

        Raises:
            CaptureError: when the session was bound without ``target=True``.
        """
        if self._target is None:
            raise CaptureError(
                f"the target {self.spec.target} was not captured: bind(model, spec, target=True)"
            )
        return self._target

    @property
    def has_target(self) -> bool:
        """Whether `target` was captured."""
        return self._target is not None

    def __getitem__(self, point: str | Point) -> Tensor:
        """[N, width] states at one point: any of its names, such as ``pre.3`` for ``post.2``.

        Raises:
            SpecError: text that is no point, or a layer out of range.
            CaptureError: a point that was not captured.
        """
        if isinstance(point, str) and point in self.columns:
            return self.packed[:, self.columns[point]]
        site_of = partial(Point.resolve, n_layers=self.n_layers, split=self.split_boundaries)
        wanted = Point.parse(point) if isinstance(point, str) else point
        site = site_of(wanted)
        for name, mine in zip(self.columns, self.spec.inputs, strict=True):
            if site_of(mine) == site:
                return self.packed[:, self.columns[name]]
        if self._target is not None and site_of(self.spec.target) == site:
            return self._target
        raise CaptureError(f"{wanted} was not captured; this session holds {self.spec}")

    def sequence(self, request: int) -> States:
        """The rows of one request, by position.

        Raises:
            CaptureError: when there is no such request.
        """
        if not 0 <= request < self.requests:
            raise CaptureError(f"no request {request}: this session holds requests 0 to {self.requests - 1}")
        rows = torch.nonzero(self.request == request).flatten()
        rows = rows[torch.argsort(self.position[rows], stable=True)]
        return replace(
            self,
            packed=self.packed[rows],
            request=self.request[rows],
            position=self.position[rows],
            phase=self.phase[rows],
            _target=None if self._target is None else self._target[rows],
        )

    def check_finite(self) -> None:
        """Make sure that no state is NaN or infinite.

        Raises:
            CaptureError: naming the first such row's point, request and position.
        """
        named = [
            (str(p), self.packed[:, at])
            for p, at in zip(self.spec.inputs, self.columns.values(), strict=True)
        ]
        if self._target is not None:
            named.append((f"target {self.spec.target}", self._target))
        if all(bool(torch.isfinite(values).all()) for _, values in named):
            return
        bad = {name: ~torch.isfinite(values).all(dim=1) for name, values in named}
        row = min(int(rows.nonzero()[0]) for rows in bad.values() if bool(rows.any()))
        where = [name for name, rows in bad.items() if bool(rows[row])]
        count = int(torch.stack(list(bad.values())).any(dim=0).sum())
        raise CaptureError(
            f"{where[0]} holds {_worst(dict(named)[where[0]][row])} at request {int(self.request[row])}, "
            f"position {int(self.position[row])}"
            + (f" (also {', '.join(where[1:])})" if where[1:] else "")
            + f"; {count} of {len(self)} rows are not finite: check the model's dtype and weights"
        )


def _worst(row: Tensor) -> str:
    return "NaN" if bool(torch.isnan(row).any()) else "infinity"
