"""Sequences to train on, of a dump or of examples; windows of them; and batches without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError, TrainingError
from ..store import Dump, Example

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


class DumpSequences:
    """A dump's sequences; states stay on disk until a piece is asked for."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self._first = dump.manifest.data.first_of_conversation()

    def __len__(self) -> int:
        return len(self.dump)

    @property
    def digest(self) -> str:
        """The digest that the dump's manifest states."""
        return self.dump.manifest.data.digest

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids and loss mask."""
        stored = self.dump.sequence(index)
        return stored.token_ids, stored.loss_mask

    def first_of_conversation(self, index: int) -> int:
        """The first turn's sequence."""
        return self._first[index]

    def piece(self, index: int, start: int, stop: int) -> Mapping[str, Tensor]:
        """Everything a head learns from.

        Raises:
            TrainingError: for a state that is NaN or infinite, with its place.
        """
        stored = self.dump.sequence(index)
        rows = slice(start, stop)
        piece = {
            "states": stored.states[rows],
            "target": stored.target[rows],
            "token_ids": stored.token_ids[rows],
            "loss_mask": stored.loss_mask[rows],
        }
        if stored.argmax is not None:
            piece["argmax"] = stored.argmax[rows]
        for name in ("states", "target"):
            bad = (~torch.isfinite(piece[name])).nonzero()
            if len(bad):
                row, column = bad[0].tolist()
                raise TrainingError(
                    f"{self.dump.directory}: {name} of sequence {index} hold NaN or infinity "
                    f"({len(bad)} values, the first at token {start + row}, column {column}); make the dump "
                    "again, in a wider dtype if the states overflow (float16 ends at 65504)"
                )
        return piece


class LiveSequences:
    """Examples without states; `LiveCapture` adds them to a batch."""

    def __init__(self, examples: Sequence[Example]) -> None:
        seen: dict[int, int] = {}
        self._first = [
            at if e.conversation is None else seen.setdefault(e.conversation, at)
            for at, e in enumerate(examples)
        ]
        self._tokens = [(e.token_ids, e.loss_mask) for e in examples]
        self._media = [e.media for e in examples]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def digest(self) -> str:
        """SHA-256 over token ids, masks and images."""
        digest = hashlib.sha256()
        for (ids, mask), media in zip(self._tokens, self._media, strict=True):
            digest.update(len(ids).to_bytes(8, "big") + ids.numpy().tobytes() + mask.numpy().tobytes())
            if media is not None:
                digest.update(media.digest.encode())
        return digest.hexdigest()

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids and loss mask."""
        return self._tokens[index]

    def first_of_conversation(self, index: int) -> int:
        """The first turn's sequence."""
        return self._first[index]

    def piece(self, index: int, start: int, stop: int) -> Mapping[str, Any]:
        """Tokens alone, with what precedes them, which the target has to read, and ``media``: its images.

        Pixels are computed here, so by the data loader's processes where there are some.

        Raises:
            DataError: an image is gone, or has changed since the data was read.
        """
        ids, mask = self._tokens[index]
        media = self._media[index]
        return {
            "token_ids": ids[start:stop],
            "loss_mask": mask[start:stop],
            "context": ids[:start],
            "context_length": torch.tensor([start]),
            "media": media.inputs() if media is not None else None,
        }
