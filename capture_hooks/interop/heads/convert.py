"""The layouts, and converting a head from one to another: exactly, or not without saying what is lost."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from ...capture import find_anatomy
from ...capture.anatomy import Anatomy
from ...conventions import BUILTIN, Conventions
from ...errors import HeadError
from ...heads import files
from ...heads.checkpoint import SettledHead
from ...spec import CaptureSpec
from .draft import CONVERSION, Draft, HeadFiles, TargetShape, by_depth
from .eagle import write_eagle
from .modelopt import write_modelopt
from .open import Layout, open_head
from .ours import cannot_say, settled, without_targets_embedding, write_ours
from .settle import settle
from .speculators import write_speculators


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """Another library's layout, as `load_head` and `convert_head` take it.

    Attributes:
        name: the layout's.
        write: the tensors and the config of a head whose inputs are in ascending depth; the second argument
            is whether a convention that was only read in its library's source may be used, the third what
            layer ids mean to each engine.
    """

    name: Layout
    write: Callable[[Draft, bool, Conventions], HeadFiles]

    def recognises(self, directory: Path, pickles: bool) -> bool:
        """Whether a directory is in this layout.

        Raises:
            HeadError: it is no head, or damaged; see `open_head`.
        """
        return open_head(directory, pickles=pickles).layout == self.name

    def settled(
        self,
        directory: Path,
        anatomy: Anatomy,
        *,
        spec: CaptureSpec | None,
        written_for: str | None,
        accept_unverified: bool,
        settings: Mapping[str, Any] | None,
        pickles: bool,
        conventions: Conventions,
    ) -> SettledHead:
        """The head of a directory; see `load_head` for the arguments.

        Raises:
            HeadError: see `settle.settle`; or our head would compute something else.
        """
        raw = open_head(directory, pickles=pickles)
        about = TargetShape.of_anatomy(anatomy)
        draft = settle(raw, about, written_for, spec, accept_unverified, conventions)
        draft.spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
        if losses := (*draft.losses, *cannot_say(draft)):
            raise HeadError(f"{directory} cannot be used as it is: {'; '.join(losses)}")
        doubt = f"{directory} carries no witness: that it eats {draft.spec} is taken on trust"
        return dataclasses.replace(settled(draft, settings), doubt=doubt)


FORMATS: Final = (
    HeadFormat("eagle", write_eagle),
    HeadFormat("modelopt", write_modelopt),
    HeadFormat("speculators", write_speculators),
)
#: Other names of a layout.
_ALIASES: Final = {"specforge": "eagle", "sglang": "capture-hooks", "vllm": "capture-hooks"}


def layout_named(name: str) -> Layout:
    """A layout by its name or by that of a tool that reads it.

    Raises:
        HeadError: there is none; the message lists them.
    """
    known: dict[str, Layout] = {"capture-hooks": "capture-hooks", **{one.name: one.name for one in FORMATS}}
    found = known.get(_ALIASES.get(name, name))
    if found is None:
        listed = ", ".join([*known, *(f"{alias} ({layout})" for alias, layout in _ALIASES.items())])
        raise HeadError(f"no layout of heads is called {name!r}; there are {listed}")
    return found


@dataclass(frozen=True, slots=True)
class HeadConversion:
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
    target: TargetShape | None = None,
    model: nn.Module | None = None,
    written_for: str | None = None,
    spec: CaptureSpec | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    accept_unverified: bool = False,
    pickles: bool = False,
    force: bool = False,
    overwrite: bool = False,
    conventions: Conventions = BUILTIN,
) -> HeadConversion:
    """Write a head in another layout; tensors keep their bits, and every flag and id is said.

    Args:
        source: a head in any layout.
        destination: where to; written whole or not at all.
        to: a layout's name; see `layout_named`.
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
    if os.path.realpath(place) == os.path.realpath(raw.directory):
        raise HeadError(f"{place} is the source itself; choose another place")
    if raw.layout == layout == "capture-hooks":
        raise HeadError(f"{raw.directory} has that layout already")
    if layout == "capture-hooks" and model is None:
        raise HeadError("a head of our own carries its target's fingerprint and states: the model is needed")
    if model is not None:
        known = TargetShape.of_anatomy(find_anatomy(model))
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
        (format_,) = (one for one in FORMATS if one.name == layout)
        written = format_.write(draft, accept_unverified, conventions)
        losses = (*draft.losses, *written.losses)
        record |= _accepted(losses, force, raw.directory, layout)
        config = {**written.config, CONVERSION: {**written.config[CONVERSION], **record}}
        with files.writing(place, overwrite) as fresh:
            files.write_tensors(fresh / files.WEIGHTS, written.tensors, {"format": "pt"})
            files.write_config(fresh / files.CONFIG, config)
        notes = written.notes
    return HeadConversion(
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
