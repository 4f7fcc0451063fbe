"""What a head's directory says, without its target and without reading a weight."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..capture.fingerprint import TargetFingerprint
from ..conventions import BUILTIN, Conventions
from ..errors import HeadError
from ..spec import CaptureSpec, Point
from . import files
from .config import CaptureSection, read_section
from .consistency import check_section, check_shapes
from .engines import EngineStatement
from .files import TensorInfo
from .order import in_order


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
        """The states it eats, in the order it was trained on."""
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
