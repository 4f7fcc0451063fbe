"""Loading a head: checked against itself and against its target."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import find_anatomy
from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..conventions import BUILTIN, Conventions
from ..errors import HeadError
from ..interop.heads.load import load_foreign
from ..plugins import registry
from ..spec import CaptureSpec
from . import files
from .config import CaptureSection, number, read_section
from .consistency import check_section, check_shapes
from .contract import DraftHead, HeadProvider
from .readout import readout_of
from .vocabulary import check_vocabulary
from .witness import Witness, check_witness, warn


def load_head(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    spec: CaptureSpec | None = None,
    written_for: str | None = None,
    inputs: CaptureSpec | None = None,
    settings: Mapping[str, Any] | None = None,
    accept_unverified: bool = False,
    pickles: bool = False,
    check_witness: bool = True,
    conventions: Conventions = BUILTIN,
) -> DraftHead:
    """Read a head and check it against itself and against its target.

    Args:
        directory: what `save_head` wrote, or an EAGLE-3 head in another library's layout.
        model: the target it will draft for.
        spec: the states the head eats, in the order of its ``fc`` columns.  With a capture section it
            must name the same states in the same order.
        written_for: the library or convention that its layer ids were written for, such as "specforge".  A
            head without a capture section needs one of the two, except in speculators' layout.
        inputs: the same states in the order wanted, to which the head's columns and norms are moved, and the
            point whose logits it shall learn on: no head computes anything from that.
        settings: of the objective, for a head of another library (ours keeps its own).
        accept_unverified: take a convention that was only read in its library's source.
        pickles: open files that ``torch.save`` wrote, of another library's head that has no others.
        check_witness: show the target the witness's tokens and compare its states.
        conventions: what layer ids may mean.

    Warns:
        HeadWarning: the target gives nearly the same states (another precision), or there is no
            witness to compare.

    Raises:
        HeadError: anything that is missing, damaged, contradicts itself or belongs to another target.
    """
    place = Path(directory)
    config = files.read_config(place)
    section = read_section(config, str(place))
    anatomy = find_anatomy(model)
    if section is None:
        head = load_foreign(
            place, anatomy, spec, written_for, accept_unverified, settings, pickles, conventions
        )
        return _ready(_in_order_of(inputs, head, anatomy, str(place)), anatomy)
    check_section(config, section, str(place), conventions=conventions)
    _check_requested(spec, section, anatomy, str(place))
    tensors = _read_weights(place, section)
    witness = _read_witness(place, section)
    check_shapes(config, files.infos_of(tensors), witness.inputs.shape[1], str(place))
    draft_size = number(config, "draft_vocab_size", str(place))
    check_vocabulary(tensors, draft_size, section.target.vocab_size, str(place))
    _check_target(place, section, anatomy, witness if check_witness else None, model)
    if "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(anatomy.vocab_size, dtype=torch.int64)
    own = section.capture_spec
    head = _restore(section.head, tensors, config, own, section.order, anatomy)
    return _ready(_in_order_of(inputs, head, anatomy, str(place)), anatomy)


def _check_requested(spec: CaptureSpec | None, section: CaptureSection, anatomy: Anatomy, where: str) -> None:
    """Check the spec that the caller expects against the one in the file."""
    if spec is None:
        return
    n_layers = section.target.n_layers
    if spec.resolve(n_layers) != section.capture_spec.resolve(n_layers):
        raise HeadError(
            f"{where}: the spec asked for is {spec}, and the head was trained on {section.capture_spec}"
        )


def _read_weights(place: Path, section: CaptureSection) -> dict[str, Tensor]:
    path = place / files.WEIGHTS
    _, tensors = files.read_tensors(path)
    files.check_digest(path, section.weights_sha256)
    return tensors


def _read_witness(place: Path, section: CaptureSection) -> Witness:
    path = place / section.witness.file
    witness = Witness.load(path)
    files.check_digest(path, section.witness.sha256)
    if witness.spec != section.capture_spec:
        raise HeadError(f"{path} holds the states {witness.spec}, and capture.spec is {section.capture_spec}")
    if len(witness.token_ids) != section.witness.tokens:
        raise HeadError(
            f"{path} holds {len(witness.token_ids)} tokens, "
            f"and capture.witness.tokens is {section.witness.tokens}"
        )
    return witness


def _check_target(
    place: Path, section: CaptureSection, anatomy: Anatomy, witness: Witness | None, model: nn.Module
) -> None:
    """Check the target by its fingerprint, and by its states where a witness is given."""
    theirs, ours = section.target, TargetFingerprint.of(anatomy)
    for name in ("n_layers", "hidden_size", "vocab_size"):
        if getattr(theirs, name) != getattr(ours, name):
            raise HeadError(
                f"{place} belongs to another target: it was trained on a model with {name} = "
                f"{getattr(theirs, name)}, and the one given has {name} = {getattr(ours, name)}"
            )
    differences = "; ".join(ours.differences(theirs))
    # A quantised copy has other parameters altogether; its states decide.
    comparable = theirs.structure == ours.structure and not _quantised(anatomy)
    if comparable and not ours.same_weights(theirs):
        raise HeadError(
            f"{place} belongs to another target (here: the one given; there: the head's): {differences}"
        )
    if witness is None:
        if not comparable and differences:
            raise HeadError(
                f"{place}: whether the target is the head's cannot be told without its witness "
                f"(here: the one given; there: the head's): {differences}"
            )
        if differences:
            warn(
                f"{place}: {differences}; the sampled weights are {ours.distance(theirs):.2g} apart, relative"
            )
        return
    report = check_witness(model, witness)
    if report.verdict == "mismatch":
        raise HeadError(
            f"{place}: the target given does not have the states the head was trained on; {report}; "
            + (
                f"here: the one given; there: the head's: {differences}"
                if differences
                else "its weights are the same"
            )
        )
    if report.verdict == "drift":
        warn(f"{place}: the target's states differ a little from the head's; {report}; {differences}")


def _quantised(anatomy: Anatomy) -> bool:
    return any(not parameter.is_floating_point() for parameter in anatomy.model.parameters())


def _restore(
    name: str,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    spec: CaptureSpec,
    order: Sequence[int],
    anatomy: Anatomy,
) -> DraftHead:
    provider: HeadProvider = registry().heads[name]
    return provider.restore(tensors, config, spec, tuple(order), anatomy, readout_of(anatomy, spec))


def _in_order_of(wanted: CaptureSpec | None, head: DraftHead, anatomy: Anatomy, where: str) -> DraftHead:
    """The same head, its inputs in the order of ``wanted`` and learning the logits of its target point."""
    if wanted is None or wanted == head.spec:
        return head
    ours = head.spec.resolve(anatomy.n_layers, anatomy.split_boundaries).inputs
    theirs = wanted.resolve(anatomy.n_layers, anatomy.split_boundaries).inputs
    if set(ours) != set(theirs):
        raise HeadError(f"{where} eats {head.spec}, and {wanted} was asked for; these are other states")
    tensors, config = head.export([ours.index(site) for site in theirs])
    spec = wanted.absolute(anatomy.n_layers)
    return _restore(head.name, tensors, config, spec, range(len(spec)), anatomy)


def _ready(head: DraftHead, anatomy: Anatomy) -> DraftHead:
    return head.eval().to(next(anatomy.embedding.parameters()).device)
