"""Where sequences come from: a dump on disk, or examples whose states are captured while training."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError
from ..store import Dump, Example


class DumpSequences:
    """A dump's sequences; states stay on disk until a piece is asked for."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self._first = dump.manifest.data.first_of_conversation()

    def __len__(self) -> int:
        return len(self.dump)

    @property
    def digest(self) -> str:
        """The dump's own."""
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
