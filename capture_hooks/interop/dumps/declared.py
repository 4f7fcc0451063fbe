"""What a user states about a dump that its files do not say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...spec import CaptureSpec
from .contract import NormState


@dataclass(frozen=True, slots=True)
class Declared:
    """Statements that a conversion may need; a missing one is asked for by an error that names the choices.

    Attributes:
        spec: the captured inputs in the order of their slots (``--spec``).  Its target point counts only
            where it is not ``final_norm``, the default of the text form.
        ids: instead, the layer ids that were given to the program that wrote the dump (``--ids``), and
        written_for: the convention they follow (``--written-for``), by its name.
        last: norm state of the last hidden state (``--last``).
        masks: where a dump has no loss mask: ``"all"`` tokens are to be learnt, or a data set whose records
            have the same token ids (``--masks all|DATA``).
        keep: what of a loss mask stays the same where two libraries' trainers apply it with another lag:
            ``"marks"``, the tokens that are marked, or ``"losses"``, the predictions that count
            (``--keep-mask``).
        target: path of the target model (``--target``).
        pickles: open .pt and .ckpt files (``--pickles``), with ``weights_only=True`` and after a check that
            they name nothing but tensors.
    """

    spec: CaptureSpec | None = None
    ids: tuple[int, ...] | None = None
    written_for: str | None = None
    last: NormState | None = None
    masks: Literal["all"] | Path | None = None
    keep: Literal["marks", "losses"] = "marks"
    target: str | None = None
    pickles: bool = False
