"""Converting a head from one library's layout to another's: exactly, or not without saying what is lost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...capture import find_anatomy
from ...conventions import BUILTIN, Conventions
from ...errors import HeadError
from ...heads import files
from ...spec import CaptureSpec
from .contract import Layout
from .draft import CONVERSION, Target
from .layouts import WRITERS, layout_named
from .open import open_head
from .ours import cannot_say, without_targets_embedding, write_ours
from .permute import by_depth
from .settle import settle


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was converted, and what its reader should know.

    Attributes:
        source, destination: the directories.
        layout_from, layout_to: their layouts.
        spec: the states it eats, in the order of the file written.
        moved: whether the inputs changed places.
        losses: what the file does not keep, a sentence each; empty unless forced.
        notes: which readers of the layout would compute something else, and what was found on the way.
        left_out: keys and tensors that no reader of a head uses, each with the reason.
    """

    source: Path
    destination: Path
    layout_from: Layout
    layout_to: Layout
    spec: CaptureSpec
    moved: bool
    losses: tuple[str, ...]
    notes: tuple[str, ...]
    left_out: Mapping[str, str]


def convert_head(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: str,
    target: Target | None = None,
    model: nn.Module | None = None,
    written_for: str | None = None,
    spec: CaptureSpec | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    accept_unverified: bool = False,
    pickles: bool = False,
    force: bool = False,
    overwrite: bool = False,
    conventions: Conventions = BUILTIN,
) -> Conversion:
    """Write a head in another layout; tensors keep their bits, and every flag and id is said.

    Args:
        source: a head in any layout.
        destination: where to; written whole or not at all.
        to: a layout's name; see `layouts`.
        target: the model it drafts for; a head that carries its fingerprint, or ``model``, says it too.
        model: the target itself, which our own layout needs for the fingerprint and the witness.
        written_for: the library or convention that the source's ids were written for.
        spec: the source's inputs, in the order of ``fc``'s columns.
        tokens: token ids for the witness of our own layout.
        accept_unverified: use a convention that was only read in its library's source.
        pickles: open files that ``torch.save`` wrote, where the source has no others.
        force: write a file that loses something, with the losses in it.
        overwrite: replace a head at ``destination``.
        conventions: what layer ids may mean.

    Raises:
        HeadError: the source is damaged, contradicts itself, or something would be lost (each loss is named).
        ConventionError: its ids mean nothing, or nothing verified, in the convention given.
    """
    layout, place = layout_named(to), Path(destination)
    raw = open_head(source, pickles=pickles)
    if place.resolve() == raw.directory.resolve():
        raise HeadError(f"{place} is the source itself; choose another place")
    if raw.layout == layout == "capture-hooks":
        raise HeadError(f"{raw.directory} has that layout already")
    if layout == "capture-hooks" and model is None:
        raise HeadError("a head of our own carries its target's fingerprint and states: the model is needed")
    if model is not None:
        known = Target.of_anatomy(find_anatomy(model))
        named = (target.name, target.architectures) if target is not None else (None, known.architectures)
        target = dataclasses.replace(known, name=named[0], architectures=named[1])
    settled = settle(raw, target, written_for, spec, accept_unverified, conventions)
    draft = by_depth(settled)
    record: dict[str, Any] = {"from": raw.layout}
    if layout == "capture-hooks":
        assert model is not None
        draft = without_targets_embedding(draft, find_anatomy(model))
        losses = (*draft.losses, *cannot_say(draft))
        record |= _accepted(losses, force, raw.directory, layout)
        report = write_ours(draft, model, tokens, place, record, overwrite, conventions)
        notes: tuple[str, ...] = tuple(str(statement) for statement in report.excluded)
    else:
        written = WRITERS[layout].write(draft, accept_unverified, conventions)
        losses = (*draft.losses, *written.losses)
        record |= _accepted(losses, force, raw.directory, layout)
        config = {**written.config, CONVERSION: {**written.config[CONVERSION], **record}}
        with files.writing(place, overwrite) as fresh:
            files.write_tensors(fresh / files.WEIGHTS, written.tensors, {"format": "pt"})
            files.write_config(fresh / files.CONFIG, config)
        notes = written.notes
    return Conversion(
        raw.directory,
        place,
        raw.layout,
        layout,
        draft.spec,
        draft.points != settled.points,
        losses,
        (*draft.notes, *notes, *_left_behind(raw.layout)),
        draft.left_out,
    )


def _accepted(losses: tuple[str, ...], force: bool, source: Path, layout: Layout) -> dict[str, Any]:
    """What the file records of its losses.

    Raises:
        HeadError: there are some, and nobody said to go on.
    """
    if losses and not force:
        listed = "".join(f"\n  - {loss}" for loss in losses)
        raise HeadError(
            f"{source} cannot be converted to {layout} exactly:{listed}\n"
            "--force writes it all the same, with these losses recorded in its config"
        )
    return {"losses": list(losses)} if losses else {}


def _left_behind(layout: Layout) -> tuple[str, ...]:
    if layout != "capture-hooks":
        return ()
    return (
        "left behind: the capture section and the witness, for which no other layout has a place; "
        "keep the source",
    )
