"""The witness: a few dozen tokens with the states the trainer saw, kept beside the head.

Any engine can be shown the tokens and its states compared with these.  The comparison is per token and
per point, leaves out the first token of each sequence (an attention sink whose state is unlike all
others), and scales every channel by its root mean square over the witness, so that a few huge channels
do not hide the rest.

On SmolLM2-135M (float32, points from 1 to 30) the median over tokens is 0.01-0.03 for a bfloat16 cast,
0.01-0.04 for 8-bit weights, and 0.42 or more for the neighbouring layer's states.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import torch
from torch import Tensor, nn

from .._version import __version__
from ..capture import bind, find_anatomy
from ..capture.anatomy import Anatomy
from ..errors import HeadError, SpecError
from ..spec import CaptureSpec, Point
from ..target.states import states_of
from . import files

FORMAT: Final = "1"
#: Up to this size two captures are the same states, computed in another order.
SAME: Final = 1e-3
#: Above this size they are other states: half of what one layer's shift measures on a small real model.
OTHER: Final = 0.2
#: Fewer comparable tokens than this decide nothing.
FEWEST: Final = 4

Verdict = Literal["matches", "drift", "mismatch"]


class HeadWarning(UserWarning):
    """A head that can be used, though not all about it could be confirmed exactly."""


@dataclass(frozen=True, slots=True)
class PointAgreement:
    """How far one point's states are from the witness: relative, channels scaled; 0 is equal."""

    point: Point
    median: float
    worst: float

    def __str__(self) -> str:
        return f"{self.point} {self.median:.2g} (worst token {self.worst:.2g})"


@dataclass(frozen=True, slots=True)
class WitnessReport:
    """The comparison, point by point, over ``tokens`` tokens."""

    points: tuple[PointAgreement, ...]
    tokens: int

    @property
    def size(self) -> float:
        """The largest of the points' medians."""
        return max(point.median for point in self.points)

    @property
    def verdict(self) -> Verdict:
        """*matches* (same numbers), *drift* (small: another precision), or *mismatch* (other states).

        Coarse quantisation (4 bits on a small model) differs by as much as a wrong layer does, and
        is called a mismatch.
        """
        size = self.size
        return "matches" if size <= SAME else "drift" if size <= OTHER else "mismatch"

    def __str__(self) -> str:
        listed = ", ".join(str(point) for point in self.points)
        return f"{self.verdict}: relative difference from the witness over {self.tokens} tokens: {listed}"


@dataclass(frozen=True, slots=True, eq=False)
class Witness:
    """Tokens and the states captured at them.

    Attributes:
        spec: the head's spec, layers absolute; its order is the order the head was trained on.
        token_ids: [T] int64, sequences end to end.
        starts: [S+1] int64 offsets of the sequences.
        states: by point text, [T, width]: the spec's inputs and its target point.
        made_with: library versions and dtype, for the reader.
    """

    spec: CaptureSpec
    token_ids: Tensor
    starts: Tensor
    states: Mapping[str, Tensor]
    made_with: str

    @property
    def inputs(self) -> Tensor:
        """[T, K*H]: the inputs packed in spec order, as the trainer saw them."""
        return torch.cat([self.states[str(point)] for point in self.spec.inputs], dim=1)

    @property
    def target(self) -> Tensor:
        """[T, H]: the state at the spec's target point."""
        return self.states[str(self.spec.target)]

    def compare(self, states: Mapping[str, Tensor]) -> WitnessReport:
        """Compare states captured at the same tokens, by point text, with these.

        Raises:
            HeadError: a point is missing or has another shape; too few tokens to tell.
        """
        kept = torch.ones(len(self.token_ids), dtype=torch.bool)
        kept[self.starts[:-1]] = False
        rows = int(kept.sum())
        if rows < FEWEST:
            raise HeadError(
                f"the witness has {rows} tokens beside each sequence's first; {FEWEST} are needed to compare"
            )
        found = []
        for name, ours in self.states.items():
            theirs = states.get(name)
            if theirs is None or theirs.shape != ours.shape:
                got = "nothing" if theirs is None else f"a shape of {list(theirs.shape)}"
                raise HeadError(
                    f"the witness holds {name} with shape {list(ours.shape)}, and {got} was captured"
                )
            errors = relative_errors(theirs[kept.to(theirs.device)], ours[kept])
            found.append(PointAgreement(Point.parse(name), float(errors.median()), float(errors.max())))
        return WitnessReport(tuple(found), rows)

    def save(self, path: Path) -> None:
        """Write as one safetensors file whose tensors are named by point."""
        metadata = {
            "format": FORMAT,
            "spec": str(self.spec),
            "order": "the spec's own order",
            "made_with": self.made_with,
            "written_by": f"capture-hooks {__version__}",
        }
        tensors = {"token_ids": self.token_ids, "starts": self.starts, **self.states}
        files.write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `save`'s file.

        Raises:
            HeadError: missing, damaged, of an unknown format, or inconsistent in itself.
        """
        metadata, tensors = files.read_tensors(path)
        if metadata.get("format") != FORMAT:
            raise HeadError(
                f"{path} is a witness of format {metadata.get('format')!r}; this version reads {FORMAT!r}"
            )
        try:
            spec = CaptureSpec.parse(metadata.get("spec", ""))
        except SpecError as error:
            raise HeadError(f"{path}: {error}") from None
        wanted = {"token_ids", "starts", *(str(point) for point in _points(spec))}
        if tensors.keys() != wanted:
            raise HeadError(
                f"{path} holds {', '.join(sorted(tensors))}; "
                f"its spec {spec} asks for {', '.join(sorted(wanted))}"
            )
        token_ids, starts = tensors.pop("token_ids"), tensors.pop("starts")
        rows = len(token_ids)
        if starts.ndim != 1 or starts[0] != 0 or starts[-1] != rows or (starts.diff() <= 0).any():
            raise HeadError(f"{path}: starts {starts.tolist()} do not cut {rows} tokens into sequences")
        if other := sorted(name for name, state in tensors.items() if state.ndim != 2 or len(state) != rows):
            raise HeadError(f"{path}: {', '.join(other)} do not hold one row for each of {rows} tokens")
        states = {str(point): tensors[str(point)] for point in _points(spec)}
        return cls(spec, token_ids, starts, states, metadata.get("made_with", "unknown"))


def make_witness(
    model: nn.Module, spec: CaptureSpec, sequences: Sequence[Sequence[int]], tokens: int = 48
) -> Witness:
    """Capture a witness from the model a head was trained on.

    Args:
        model: the target.
        spec: the head's spec.
        sequences: token ids of held-out conversations; taken in turn, the last one cut short.
        tokens: how many to keep.

    Raises:
        HeadError: the sequences hold too few tokens.
        CaptureError: the model's states hold NaN.
    """
    taken: list[list[int]] = []
    for sequence in sequences:
        room = tokens - sum(len(part) for part in taken)
        if room < 2:
            break
        if len(sequence) >= 2:
            taken.append([int(token) for token in sequence[:room]])
    rows = sum(len(part) - 1 for part in taken)
    if rows < FEWEST:
        raise HeadError(
            f"a witness needs at least {FEWEST} tokens beside each sequence's first; "
            f"{len(sequences)} sequences and tokens={tokens} give {rows}"
        )
    anatomy = find_anatomy(model)
    absolute = spec.absolute(anatomy.n_layers)
    token_ids = torch.tensor([token for part in taken for token in part], dtype=torch.int64)
    starts = torch.tensor([0, *(len(part) for part in taken)]).cumsum(0)
    states = _capture(anatomy, absolute, token_ids, starts)
    dtype = str(next(iter(states.values())).dtype).removeprefix("torch.")
    return Witness(absolute, token_ids, starts, states, f"torch {torch.__version__}, {dtype}")


def check_witness(model: nn.Module, witness: Witness) -> WitnessReport:
    """Capture the witness's points at its tokens from ``model`` and compare.

    Raises:
        HeadError: the model cannot run these tokens or lacks a point.
    """
    anatomy = find_anatomy(model)
    largest, rows = int(witness.token_ids.max()), next(anatomy.embedding.parameters()).shape[0]
    if largest >= rows:
        raise HeadError(f"the witness holds token id {largest}; the target embeds {rows} tokens")
    return witness.compare(_capture(anatomy, witness.spec, witness.token_ids, witness.starts))


def _points(spec: CaptureSpec) -> tuple[Point, ...]:
    """The inputs, then the target where it is none of them."""
    return spec.inputs if spec.target in spec.inputs else (*spec.inputs, spec.target)


def relative_errors(theirs: Tensor, ours: Tensor) -> Tensor:
    """[rows] relative errors with every channel scaled by its root mean square in ``ours``."""
    a, b = theirs.detach().cpu().double(), ours.double()
    scale = b.square().mean(0).sqrt()
    # A channel that is zero throughout (a pruned one) has no scale of its own.
    scale = torch.where(scale > 0, scale, b.square().mean().sqrt().clamp(min=1e-30))
    size = (b / scale).norm(dim=1).clamp(min=1e-30)
    errors: Tensor = ((a - b) / scale).norm(dim=1) / size
    return torch.where(torch.isfinite(errors), errors, torch.inf)


def _capture(anatomy: Anatomy, spec: CaptureSpec, token_ids: Tensor, starts: Tensor) -> dict[str, Tensor]:
    """States on the CPU, by point text, from one plain forward per sequence."""
    capture = bind(anatomy.model, spec, target=True, anatomy=anatomy)
    found = [
        states_of(capture, [token_ids[start:end]], stop=True)[0]
        for start, end in itertools.pairwise(starts.tolist())
    ]
    names = [str(point) for point in _points(spec)]
    return {name: torch.cat([states[name].cpu() for states in found]) for name in names}
