"""Teacher-forced acceptance: how often the head's first choice is the target's, per draft position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Anatomy, bind
from ..errors import DataError
from ..heads.contract import DraftHead, TrainBatch
from ..store.data import Media
from ..store.forward import run_with_images


@dataclass(frozen=True, slots=True)
class OfflineAcceptance:
    """Counts over teacher-forced rows, position by position.

    At position i the head has been fed its own outputs i times but the data's tokens throughout, so
    the figure is conditional on the positions before it as far as tokens go.
    """

    hits: tuple[float, ...]
    rows: tuple[float, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of rows whose draft arg-max is the target's greedy token."""
        return tuple(h / r if r else float("nan") for h, r in zip(self.hits, self.rows, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        acceptance = [h / r if r else None for h, r in zip(self.hits, self.rows, strict=True)]
        return {"acceptance": acceptance, "rows": list(self.rows)}


def offline_acceptance(
    model: nn.Module,
    head: DraftHead,
    sequences: Sequence[tuple[Tensor, Tensor]],
    *,
    media: Sequence[Media | None] | None = None,
    anatomy: Anatomy | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> OfflineAcceptance:
    """Run target and head over answered conversations.

    Args:
        model: the target.
        head: its head; asked in eval mode, left in the mode it was in.
        sequences: token ids [T] and loss masks [T] (bool, the answers' tokens).
        media: the images of each sequence.
        anatomy: the target's parts, if known.
        on_progress: called with the number of sequences done.

    Raises:
        DataError: when there is no sequence.
    """
    if not sequences:
        raise DataError("offline acceptance needs answered conversations, and there is none")
    capture = bind(model, head.spec, target=True, anatomy=anatomy)
    device: Any = capture.anatomy.embedding.weight.device
    was_training = head.training
    head.eval()
    hits = rows = None
    try:
        with torch.no_grad():
            for done, (ids, mask) in enumerate(sequences, start=1):
                capture.anatomy.lengths.forget()
                shown = media[done - 1] if media is not None else None
                with capture:
                    if shown is not None:
                        run_with_images(model, shown.inputs(), device)
                    else:
                        capture.run(input_ids=ids[None].to(device), stop=True)
                states = capture.states
                sums = head(
                    TrainBatch(
                        states=states.packed,
                        target=states.target,
                        token_ids=ids.to(device),
                        loss_mask=mask.to(device),
                        starts=torch.tensor([0, len(ids)], device=device),
                    )
                )
                hits = sums.hits if hits is None else hits + sums.hits
                rows = sums.rows if rows is None else rows + sums.rows
                if on_progress is not None:
                    on_progress(done)
    finally:
        head.train(was_training)
    assert hits is not None
    assert rows is not None
    return OfflineAcceptance(tuple(hits.tolist()), tuple(rows.tolist()))
