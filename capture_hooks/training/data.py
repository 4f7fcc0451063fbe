"""From sequences to packed batches: windows, the data set over them, and the collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError

#: Step 0 predicts the token two rows ahead, so a shorter piece holds nothing to learn.
MIN_TOKENS = 3


class Sequences(Protocol):
    """A numbered collection of sequences: a dump, or examples whose states are captured while training."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> str:
        """Identifies token ids and masks, in order."""
        ...

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids [T] int64 and loss mask [T] bool of one sequence."""
        ...

    def first_of_conversation(self, index: int) -> int:
        """The first sequence of the conversation that this one is a turn of; itself where it is alone."""
        ...

    def piece(self, index: int, start: int, stop: int) -> Mapping[str, Any]:
        """Rows start..stop-1 as named tensors, each with one row per token; ``media`` as `Media.inputs`."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """Rows ``start..stop-1`` of sequence ``sequence``."""

    sequence: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


def windows(sequences: Sequences, chosen: Sequence[int], longest: int) -> list[Window]:
    """Cut the chosen sequences into consecutive, non-overlapping pieces of at most ``longest`` tokens.

    States were computed with their whole context, so a later piece still knows what came before it;
    only the head's own attention starts afresh.  Pieces without a token to learn are left out.
    """
    pieces = []
    for index in chosen:
        _, mask = sequences.tokens(index)
        for start in range(0, len(mask), longest):
            stop = min(start + longest, len(mask))
            if bool(mask[start + MIN_TOKENS - 1 : stop].any()):
                pieces.append(Window(index, start, stop))
    return pieces


class WindowDataset(Dataset[Mapping[str, Any]]):
    """The pieces of a collection of sequences."""

    def __init__(self, sequences: Sequences, pieces: Sequence[Window]) -> None:
        self.sequences, self.pieces = sequences, pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        piece = self.pieces[index]
        return self.sequences.piece(piece.sequence, piece.start, piece.stop)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each piece."""
        return [piece.length for piece in self.pieces]


def pack(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay pieces end to end without padding; ``starts`` [S+1] says where each begins, ``media`` is a list."""
    if not pieces:
        raise DataError("a batch of no sequences")
    lengths = torch.tensor([0] + [len(piece["token_ids"]) for piece in pieces])
    packed: dict[str, Any] = {
        name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0] if name != "media"
    }
    if "media" in pieces[0]:
        packed["media"] = [piece["media"] for piece in pieces]
    packed["starts"] = lengths.cumsum(0)
    return packed
