"""A dump's rows as the destination wants them: masks found and moved, norms applied, every id looked at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...errors import StoreError
from ...store.data import read_examples
from ...store.stream import view
from .contract import Facts, Rows, Source
from .masks import same_losses


class MaskSource:
    """Where masks come from for dumps that have none: all tokens, or a data set's record of the same ids.

    Raises:
        DataError: the data set cannot be used.
    """

    def __init__(self, masks: Literal["all"] | Path) -> None:
        self._path = masks if isinstance(masks, Path) else None
        self._by_ids: dict[bytes, Tensor] = {}
        if self._path is not None:
            examples = read_examples(self._path)
            self._by_ids = {bytes(view(example.token_ids)): example.loss_mask for example in examples}

    def of(self, place: str, ids: Tensor) -> Tensor:
        """The mask [T] of one sequence.

        Raises:
            StoreError: no record has these ids.
        """
        if self._path is None:
            return torch.ones(len(ids), dtype=torch.bool)
        if (mask := self._by_ids.get(bytes(view(ids.contiguous())))) is None:
            raise StoreError(
                f"{place}: no record of {self._path} has the same token ids, so its mask is unknown"
            )
        return mask


class Prepared:
    """A `Source` over another one.

    Args:
        source: what is read.
        masks: for dumps without masks; None where they have them.
        lags: mask lags of source and destination, where losses are to stay the same; None to keep the marks.
        normed: applied to the last hidden state; None to leave it.
        vocabulary: ids below it are the target's; None where that is not known.
        done: called with the number of sequences read so far.
    """

    def __init__(
        self,
        source: Source,
        *,
        masks: MaskSource | None,
        lags: tuple[int, int] | None,
        normed: Callable[[Tensor], Tensor] | None,
        vocabulary: int | None,
        done: Callable[[int], None],
    ) -> None:
        self._source, self._masks, self._lags = source, masks, lags
        self._normed, self._vocabulary, self._done = normed, vocabulary, done

    @property
    def facts(self) -> Facts:
        return self._source.facts

    def __len__(self) -> int:
        return len(self._source)

    def place(self, index: int) -> str:
        return self._source.place(index)

    def notes(self) -> tuple[str, ...]:
        return self._source.notes()

    def tokens(self, index: int) -> tuple[Tensor, Tensor | None]:
        ids, mask = self._source.tokens(index)
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or (self._vocabulary is not None and most >= self._vocabulary):
            limit = "" if self._vocabulary is None else f" of {self._vocabulary}"
            raise StoreError(
                f"{self.place(index)}: token ids from {least} to {most} do not fit a vocabulary{limit}: "
                "the dump is damaged, or of another model or tokenizer"
            )
        return ids, self._mask(self.place(index), ids, mask)

    def rows(self, index: int) -> Rows:
        rows = self._source.rows(index)
        mask = self._mask(rows.place, rows.token_ids, rows.loss_mask)
        last = rows.last if self._normed is None else self._normed(rows.last)
        self._done(index + 1)
        return dataclasses.replace(rows, loss_mask=mask, last=last)

    def _mask(self, place: str, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None if self._masks is None else self._masks.of(place, ids)
        if self._masks is not None:
            raise StoreError(f"{place} has a loss mask of its own; leave --masks out")
        return mask if self._lags is None else same_losses(mask, *self._lags, place)
