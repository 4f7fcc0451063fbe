"""Saving a head as every library reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._version import __version__
from ..capture import find_anatomy
from ..capture.anatomy import Anatomy
from ..capture.fingerprint import TargetFingerprint
from ..conventions import BUILTIN, Conventions
from ..errors import HeadError
from ..plugins import registry
from ..spec import CaptureSpec
from . import files
from .config import CaptureSection, WitnessFile, compose, model_type
from .consistency import check_section, check_shapes
from .contract import DraftHead, HeadProvider
from .engines import EngineStatement, statements
from .order import depth_order, in_order
from .vocabulary import check_vocabulary
from .witness import Witness


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
    provider: HeadProvider = registry().heads[head.name]
    _check_belongs(head, witness, anatomy)
    order = depth_order(head.spec, anatomy.n_layers)
    tensors, fields = head.export(order)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    if len(head.draft_token_ids) == anatomy.vocab_size:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return write_head(
        place,
        provider=provider.name,
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
    provider: str,
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
    files.check_finite(tensors, f"the head {provider}")
    check_vocabulary(tensors, draft_size, anatomy.vocab_size, f"the head {provider}")
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
            head=provider,
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
        config = compose(fields, anatomy, len(points), engines, section, tensors)
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
