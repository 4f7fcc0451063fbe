"""The witness shown to a server before it serves: through every path that feeds the draft head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from capture_hooks.capture import Anatomy, bind
from capture_hooks.capture.plan import every_point
from capture_hooks.engines.reports import Proof
from capture_hooks.heads import Witness
from capture_hooks.heads.fit import fit_wiring
from capture_hooks.spec import CaptureSpec, Point

from .passes import CachedSequence

#: Tokens in one pass of target verify.
VERIFIED: Final = 4


def prove(worker: Any, anatomy: Anatomy, points: tuple[Point, ...], witness: Witness) -> Proof:
    """Show the witness to the target of ``worker`` and judge what was stored for the draft head.

    Args:
        worker: SGLang's ``TpModelWorker`` of the target, attached (`Delivery.attach`).
        anatomy: of its model.
        points: the head's input, in its order.
        witness: the head's.

    Raises:
        EngineError: a path that stores nothing, too little or too much.
    """
    with _every_state(anatomy) as states:
        whole = _through(worker, witness, _whole)
    paths = {"extend": whole, "chunked extend": _through(worker, witness, _chunked)}
    speculative = not worker.model_runner.spec_algorithm.is_none()
    if speculative:
        paths["target verify"] = _through(worker, witness, _verified)
    return Proof(
        {
            name: fit_wiring(witness, points, delivered, states(), rows)
            for name, (delivered, rows) in paths.items()
        }
    )


_Path = Callable[[CachedSequence, int], Iterator[tuple[Tensor, range]]]


def _whole(sequence: CachedSequence, length: int) -> Iterator[tuple[Tensor, range]]:
    yield sequence.extend(length), range(length)


def _chunked(sequence: CachedSequence, length: int) -> Iterator[tuple[Tensor, range]]:
    middle = length // 2
    yield sequence.extend(middle), range(middle)
    yield sequence.extend(length), range(middle, length)


def _verified(sequence: CachedSequence, length: int) -> Iterator[tuple[Tensor, range]]:
    """Everything in the cache first; then all but the first token again, a chain of drafts at a time."""
    sequence.extend(length)
    for start in range(1, length - VERIFIED + 1, VERIFIED):
        yield sequence.verify(start, VERIFIED), range(start, start + VERIFIED)


def _through(worker: Any, witness: Witness, path: _Path) -> tuple[Tensor, Tensor]:
    """Stored states [R, width] and the witness rows [R] they are of."""
    stored: list[Tensor] = []
    rows: list[int] = []
    for start, end in itertools.pairwise(witness.starts.tolist()):
        sequence = CachedSequence(worker, witness.token_ids[start:end].tolist())
        try:
            for states, where in path(sequence, end - start):
                stored.append(states)
                rows.extend(start + position for position in where)
        finally:
            sequence.free()
    return torch.cat(stored), torch.tensor(rows)


@contextmanager
def _every_state(anatomy: Anatomy) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Capture every boundary of the target, by our own hooks, while the witness is extended."""
    points = [
        tap.point for tap in every_point(anatomy) if tap.point.kind != "pre" or _apart(anatomy, tap.point)
    ]
    spec = CaptureSpec(tuple(points))
    with bind(anatomy.model, spec, anatomy=anatomy) as capture:
        yield lambda: {str(point): capture.states[str(point)].float().cpu() for point in points}


def _apart(anatomy: Anatomy, point: Point) -> bool:
    """Whether ``pre.k`` is a state of its own, not the one that left the layer before."""
    return point.layer in anatomy.split_boundaries
