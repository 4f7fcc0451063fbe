"""Loading a head: checked against itself and against its target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import find_anatomy
from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..errors import HeadError
from ..plugins import registry
from ..spec import CaptureSpec
from . import files, foreign
from .config import CaptureSection, model_type, number, read_section
from .consistency import check_section, check_shapes
from .contract import DraftHead
from .readout import readout_of
from .vocabulary import check_vocabulary
from .witness import Witness, check_witness, warn


def load_head(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    spec: CaptureSpec | None = None,
    check_witness: bool = True,
) -> DraftHead:
    """Read a head and check it against itself and against its target.

    Args:
        directory: what `save_head` wrote, or another library's raw EAGLE-3 checkpoint.
        model: the target it will draft for.
        spec: the states the head eats, in the order of its ``fc`` columns.  Needed for a head
            without a capture section; with one, it must name the same states in the same order.
        check_witness: show the target the witness's tokens and compare its states.

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
        if spec is None:
            raise foreign.ambiguous(config, anatomy.n_layers, model_type(anatomy), str(place))
        return _load_foreign(place, config, anatomy, spec)
    check_section(config, section, str(place))
    _check_requested(spec, section, anatomy, str(place))
    tensors = _read_weights(place, section)
    witness = _read_witness(place, section)
    check_shapes(config, files.infos_of(tensors), witness.inputs.shape[1], str(place))
    draft_size = number(config, "draft_vocab_size", str(place))
    check_vocabulary(tensors, draft_size, section.target.vocab_size, str(place))
    _check_target(place, section, anatomy, witness if check_witness else None, model)
    return _restore(section.head, tensors, config, section.capture_spec, section.order, anatomy)


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
    _check_digest(path, section.weights_sha256)
    return tensors


def _read_witness(place: Path, section: CaptureSection) -> Witness:
    path = place / section.witness.file
    witness = Witness.load(path)
    _check_digest(path, section.witness.sha256)
    if witness.spec != section.capture_spec:
        raise HeadError(f"{path} holds the states {witness.spec}, and capture.spec is {section.capture_spec}")
    if len(witness.token_ids) != section.witness.tokens:
        raise HeadError(
            f"{path} holds {len(witness.token_ids)} tokens, "
            f"and capture.witness.tokens is {section.witness.tokens}"
        )
    return witness


def _check_digest(path: Path, wanted: str) -> None:
    if (found := files.digest(path)) != wanted:
        raise HeadError(
            f"{path} was changed after the head was saved: its SHA-256 is {found[:16]}..., "
            f"and the capture section says {wanted[:16]}...; save the head again with save_head"
        )


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


def _load_foreign(place: Path, config: dict[str, Any], anatomy: Anatomy, spec: CaptureSpec) -> DraftHead:
    """A head of another library, with the spec that the caller vouches for."""
    where = str(place)
    name = foreign.provider_name(config, where)
    if not (place / files.WEIGHTS).exists():
        others = sorted(p.name for p in place.glob("*.bin")) + sorted(
            p.name for p in place.glob("*.safetensors")
        )
        raise HeadError(
            f"{where} has no {files.WEIGHTS}"
            + (
                f" but {', '.join(others)}; convert them into one safetensors file (pickles are never loaded)"
                if others
                else ""
            )
        )
    _, tensors = files.read_tensors(place / files.WEIGHTS)
    tensors = foreign.renamed(tensors)
    absolute = spec.absolute(anatomy.n_layers)
    absolute.resolve(anatomy.n_layers, anatomy.split_boundaries)
    config = foreign.normalised(config, len(absolute), anatomy.hidden_size)
    for field, value in (
        ("vocab_size", anatomy.vocab_size),
        ("target_hidden_size", anatomy.hidden_size),
        ("num_aux_hidden_states", len(absolute)),
    ):
        if (found := number(config, field, where)) != value:
            raise HeadError(f"{where}: {field} is {found}, and the target and the spec given ask for {value}")
    check_shapes(config, files.infos_of(tensors), len(absolute) * anatomy.hidden_size, where)
    check_vocabulary(tensors, number(config, "draft_vocab_size", where), anatomy.vocab_size, where)
    warn(f"{where} carries no witness: that it eats {absolute} is taken on trust")
    return _restore(name, tensors, config, absolute, range(len(absolute)), anatomy)


def _restore(
    name: str,
    tensors: dict[str, Tensor],
    config: Mapping[str, Any],
    spec: CaptureSpec,
    order: Any,
    anatomy: Anatomy,
) -> DraftHead:
    if "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(anatomy.vocab_size, dtype=torch.int64)
    provider, readout = registry().heads[name], readout_of(anatomy, spec)
    head = provider.restore(tensors, config, spec, tuple(order), anatomy, readout)
    return head.eval().to(next(anatomy.embedding.parameters()).device)
