"""A head's directory: described without its target, loaded for one, and saved.

Loading is three steps, whoever wrote the files: *open* them, *settle* every question (`SettledHead`), and
*restore* the head by its provider.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .._version import __version__
from ..capture import find_anatomy
from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..conventions import BUILTIN, Conventions
from ..errors import HeadError
from ..plugins import registry
from ..spec import CaptureSpec, Point
from . import files
from .config import (
    CaptureSection,
    WitnessFile,
    compose,
    depth_order,
    in_order,
    model_type,
    number,
    read_section,
)
from .consistency import check_section, check_shapes
from .contract import DraftHead, HeadProvider
from .engines import EngineStatement, statements
from .files import TensorInfo
from .readout import readout_of
from .vocabulary import check_vocabulary
from .witness import HeadWarning, Witness, check_witness


def installed_heads() -> Mapping[str, HeadProvider]:
    """The kinds of head that plugins add, by name."""
    return registry().heads


@dataclass(frozen=True, slots=True)
class HeadDescription:
    """A head on disk.

    Attributes:
        directory: where it lies.
        config: the whole ``config.json``.
        tensors: shape and dtype of every weight, by name.
        section: its capture section; None for another library's head.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    section: CaptureSection | None

    @property
    def spec(self) -> CaptureSpec | None:
        """The states it takes as input, in the order it was trained on."""
        return self.section.capture_spec if self.section else None

    @property
    def file_inputs(self) -> tuple[Point, ...]:
        """The inputs in the file's order; empty where nothing says."""
        return in_order(self.section.capture_spec, self.section.order) if self.section else ()

    @property
    def target(self) -> TargetFingerprint | None:
        """The model it was trained on."""
        return self.section.target if self.section else None

    @property
    def engines(self) -> tuple[EngineStatement, ...]:
        """For which engines the directory is right."""
        return tuple(self.section.engines) if self.section else ()

    @property
    def parameters(self) -> int:
        """Number of weights (the vocabulary maps are none)."""
        return sum(math.prod(info.shape) for name, info in self.tensors.items() if name not in ("d2t", "t2d"))

    def __str__(self) -> str:
        if self.section is None:
            return (
                f"{self.directory}: another library's head, {self.parameters:,} weights, no capture section"
            )
        target = self.section.target
        lines = [
            f"{self.directory}: {self.section.head} head, {self.parameters:,} weights, "
            f"by {self.section.written_by}",
            f"  eats {self.spec}",
            f"  of {target.architecture}: {target.n_layers} layers, {target.hidden_size} wide, "
            f"{target.vocab_size} tokens (drafts {self.config.get('draft_vocab_size')})",
            *(f"  {statement}" for statement in self.section.engines),
        ]
        return "\n".join(lines)


def inspect_head(
    directory: str | os.PathLike[str], *, ids: bool = True, conventions: Conventions = BUILTIN
) -> HeadDescription:
    """Read and cross-check what a head's directory says of itself.

    Args:
        directory: the head's.
        ids: whether the layer ids that engines read are checked too.  False is for a reader that takes the
            section's word and has the witness prove it.
        conventions: what layer ids may mean.

    Raises:
        HeadError: something is missing, damaged or contradicts something else.
    """
    place = Path(directory)
    config = files.read_config(place)
    section = read_section(config, str(place))
    _, tensors = files.read_header(place / files.WEIGHTS)
    if section is not None:
        check_section(config, section, str(place), ids, conventions)
        _, witness = files.read_header(place / section.witness.file)
        if absent := [point for point in section.file_inputs if point not in witness]:
            raise HeadError(f"{place / section.witness.file} lacks the states {', '.join(absent)}")
        check_shapes(
            config, tensors, sum(witness[point].shape[1] for point in section.file_inputs), str(place)
        )
    return HeadDescription(place, config, tensors, section)


@dataclass(frozen=True, slots=True, eq=False)
class SettledHead:
    """All that a provider needs to restore a head.

    Attributes:
        kind: the provider's name.
        tensors: in the names that `DraftHead.export` gives.
        config: the fields of its config.
        spec: the states it takes as input.
        order: input ``order[i]`` of the spec is input i of the tensors.
        doubt: what could not be confirmed, for a warning; empty if all was.
    """

    kind: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    spec: CaptureSpec
    order: Sequence[int]
    doubt: str = ""


class HeadFormat(Protocol):
    """Reads heads in one other library's layout; `capture_hooks.interop.heads.FORMATS` has them all."""

    def recognises(self, directory: Path, pickles: bool) -> bool:
        """Whether a directory is in this layout.

        Raises:
            HeadError: it is no head, or damaged.
        """
        ...

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
        """The head of a directory, every question answered; see `load_head` for the arguments.

        Raises:
            HeadError: it contradicts itself or the target, leaves something open, or computes something else.
        """
        ...


def load_head(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    formats: Iterable[HeadFormat] = (),
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
        directory: what `save_head` wrote, or a head in another library's layout.
        model: the target it will draft for.
        formats: readers of other libraries' layouts; none is read unless given here.
        spec: the head's input states, in the order of its ``fc`` columns.  With a capture section it
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
        format_ = next((one for one in formats if one.recognises(place, pickles)), None)
        if format_ is None:
            raise HeadError(
                f"{place} has no capture section: it is another library's head, in none of the formats given "
                "(formats=capture_hooks.interop.heads.FORMATS reads all that are known)"
            )
        settled = format_.settled(
            place,
            anatomy,
            spec=spec,
            written_for=written_for,
            accept_unverified=accept_unverified,
            settings=settings,
            pickles=pickles,
            conventions=conventions,
        )
    else:
        settled = _settled(place, config, section, spec, anatomy, check_witness, conventions)
    head = restore(settled, anatomy)
    if settled.doubt:
        warnings.warn(settled.doubt, HeadWarning, stacklevel=2)
    if inputs is not None and inputs != head.spec:
        head = _in_order_of(inputs, head, anatomy, str(place))
    return head.eval().to(next(anatomy.embedding.parameters()).device)


def restore(settled: SettledHead, anatomy: Anatomy) -> DraftHead:
    """The head as an object.

    Raises:
        HeadError: its provider finds tensors or fields missing, misshapen or contradictory.
    """
    return installed_heads()[settled.kind].restore(
        settled.tensors,
        settled.config,
        settled.spec,
        tuple(settled.order),
        anatomy,
        readout_of(anatomy, settled.spec),
    )


def _settled(
    place: Path,
    config: Mapping[str, Any],
    section: CaptureSection,
    spec: CaptureSpec | None,
    anatomy: Anatomy,
    use_witness: bool,
    conventions: Conventions,
) -> SettledHead:
    """A head with a capture section, checked against itself and against its target."""
    check_section(config, section, str(place), conventions=conventions)
    _check_requested(spec, section, anatomy, str(place))
    tensors = _read_weights(place, section)
    witness = _read_witness(place, section)
    check_shapes(config, files.infos_of(tensors), witness.inputs.shape[1], str(place))
    draft_size = number(config, "draft_vocab_size", str(place))
    check_vocabulary(tensors, draft_size, section.target.vocab_size, str(place))
    doubt = _check_target(place, section, anatomy, witness if use_witness else None)
    if "d2t" not in tensors:
        tensors["d2t"] = torch.zeros(anatomy.vocab_size, dtype=torch.int64)
    return SettledHead(section.head, tensors, config, section.capture_spec, section.order, doubt)


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


def _check_target(place: Path, section: CaptureSection, anatomy: Anatomy, witness: Witness | None) -> str:
    """Check the target by its fingerprint, and by its states where a witness is given; what is in doubt."""
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
        apart = f"the sampled weights are {ours.distance(theirs):.2g} apart, relative"
        return f"{place}: {differences}; {apart}" if differences else ""
    report = check_witness(anatomy.model, witness)
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
        return f"{place}: the target's states differ a little from the head's; {report}; {differences}"
    return ""


def _quantised(anatomy: Anatomy) -> bool:
    return any(not parameter.is_floating_point() for parameter in anatomy.model.parameters())


def _in_order_of(wanted: CaptureSpec, head: DraftHead, anatomy: Anatomy, where: str) -> DraftHead:
    """The same head, its inputs in the order of ``wanted`` and learning the logits of its target point."""
    ours = head.spec.resolve(anatomy.n_layers, anatomy.split_boundaries).inputs
    theirs = wanted.resolve(anatomy.n_layers, anatomy.split_boundaries).inputs
    if set(ours) != set(theirs):
        raise HeadError(f"{where} eats {head.spec}, and {wanted} was asked for; these are other states")
    tensors, config = head.export([ours.index(site) for site in theirs])
    spec = wanted.absolute(anatomy.n_layers)
    return restore(SettledHead(head.name, tensors, config, spec, range(len(spec))), anatomy)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Where a head was saved, and for which engines the directory is right."""

    directory: Path
    engines: tuple[EngineStatement, ...]

    @property
    def excluded(self) -> tuple[EngineStatement, ...]:
        """The engines that cannot serve this head, each with its reasons."""
        return tuple(statement for statement in self.engines if not statement.right)

    def __str__(self) -> str:
        return "\n".join([f"saved {self.directory}", *(f"  {statement}" for statement in self.engines)])


def save_head(
    head: DraftHead,
    directory: str | os.PathLike[str],
    *,
    model: nn.Module,
    witness: Witness,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    conventions: Conventions = BUILTIN,
) -> SaveReport:
    """Write ``model.safetensors``, ``config.json`` and ``capture/witness.safetensors``, all or none.

    Inputs are written in ascending depth, the head's columns and per-input norms permuted to match.
    With a sharded target every process must call this, as taking the fingerprint gathers weights;
    give each its own directory and keep one.

    Args:
        head: the trained head.
        directory: where to; its parents are made.
        model: the target the head was trained on.
        witness: states of held-out tokens on that target, from `make_witness`.
        dtype: round the weights to this dtype; None keeps the head's own.
        overwrite: replace a head that is already there (never before the new one is complete).
        conventions: what layer ids mean to each engine.

    Returns:
        Which engines the directory is right for, and why not for the others.

    Raises:
        HeadError: the head, the witness and the target disagree; the weights hold NaN; the directory is
            taken; no permission or space.
    """
    place = Path(directory)
    anatomy = find_anatomy(model)
    _check_belongs(head, witness, anatomy)
    order = depth_order(head.spec, anatomy.n_layers)
    tensors, fields = head.export(order)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    if len(head.draft_token_ids) == anatomy.vocab_size:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return write_head(
        place,
        kind=head.name,
        spec=head.spec,
        order=order,
        tensors=tensors,
        fields=fields,
        draft_size=len(head.draft_token_ids),
        anatomy=anatomy,
        witness=witness,
        overwrite=overwrite,
        conventions=conventions,
    )


def write_head(
    place: Path,
    *,
    kind: str,
    spec: CaptureSpec,
    order: Sequence[int],
    tensors: Mapping[str, Tensor],
    fields: Mapping[str, Any],
    draft_size: int,
    anatomy: Anatomy,
    witness: Witness,
    overwrite: bool,
    conventions: Conventions,
) -> SaveReport:
    """Write a head's directory from exported tensors and fields, all or nothing; see `save_head`.

    Raises:
        HeadError: as `save_head`.
    """
    schema = installed_heads()[kind].schema
    files.check_finite(tensors, f"the head {kind}")
    check_vocabulary(tensors, draft_size, anatomy.vocab_size, f"the head {kind}")
    points = in_order(spec, order)
    engines = statements(
        points,
        anatomy.n_layers,
        model_type(anatomy),
        any(point.resolve(anatomy.n_layers).boundary in anatomy.split_boundaries for point in points),
        fields,
        tensors,
        __version__,
        conventions,
    )
    with files.writing(place, overwrite) as fresh:
        files.write_tensors(fresh / files.WEIGHTS, tensors, {"format": "pt"})
        witness.save(fresh / files.WITNESS)
        section = CaptureSection(
            written_by=f"capture-hooks {__version__}",
            head=kind,
            spec=spec.to_json(),
            order=list(order),
            file_inputs=[str(point) for point in points],
            target=TargetFingerprint.of(anatomy),
            engines=list(engines),
            weights_sha256=files.digest(fresh / files.WEIGHTS),
            witness=WitnessFile(
                file=files.WITNESS, tokens=len(witness.token_ids), sha256=files.digest(fresh / files.WITNESS)
            ),
        )
        config = compose(schema, fields, anatomy, len(points), engines, section, tensors)
        # The same checks that a reader makes: a head that could not be loaded is not written.
        check_section(config, section, str(place), conventions=conventions)
        check_shapes(config, files.infos_of(tensors), witness.inputs.shape[1], str(place))
        files.write_config(fresh / files.CONFIG, config)
    return SaveReport(place, engines)


def _check_belongs(head: DraftHead, witness: Witness, anatomy: Anatomy) -> None:
    if head.target_layers != anatomy.n_layers:
        raise HeadError(
            f"the head was made for a target of {head.target_layers} layers, "
            f"and the target given has {anatomy.n_layers}"
        )
    head.spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
    if head.spec != head.spec.absolute(anatomy.n_layers):
        raise HeadError(f"the head's spec {head.spec} has negative layers; a head carries absolute ones")
    if witness.spec != head.spec:
        raise HeadError(f"the witness holds the states {witness.spec}, and the head eats {head.spec}")
