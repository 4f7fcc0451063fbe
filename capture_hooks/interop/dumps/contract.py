"""What a dump format is: recognised, opened for reading, written; and how its own library interprets it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from ...spec import CaptureSpec

#: Whether a last hidden state has passed the target's final norm.
NormState = Literal["normed", "unnormed"]


@dataclass(frozen=True, slots=True)
class DumpMeaning:
    """How a format's own library interprets its files, which the files themselves do not say.

    Attributes:
        library, versions: whose code was read.
        last: the norm state of the last hidden state; None where that differs from file to file.
        about_last: how that is known, with file and line.
        mask_lag: its trainer weights the prediction of x[p] by ``loss_mask[p - mask_lag]``; None where files
            have no mask.
        about_mask: how that is known, with file and line.
        wants: the norm state that a writer must give it; None for either.
    """

    library: str
    versions: str
    last: NormState | None
    about_last: str
    mask_lag: int | None
    about_mask: str
    wants: NormState | None


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One sequence of T tokens as it lies in a file; tensors may be views into a memory map.

    Attributes:
        place: file or row, for messages.
        token_ids: [T] int64, x[t].
        loss_mask: [T] bool, the file's marks unmoved; None where it has none.
        inputs: [T, K*H] the captured inputs in the file's order; rows may be strided.
        last: [T, H] the last hidden state.
        name: what the format calls the sequence (ModelOpt's conversation id); None where it has no name.
        norm: norm state of ``last`` where the file itself says it.
    """

    place: str
    token_ids: Tensor
    loss_mask: Tensor | None
    inputs: Tensor
    last: Tensor
    name: str | None = None
    norm: NormState | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What an opened dump is known to hold.

    Attributes:
        dtype: of its states, e.g. ``"bfloat16"``.
        width: columns of ``inputs``.
        hidden: columns of ``last``.
        last: norm state where the dump itself says it.
        spec: the points where the dump itself says them.
        uniform: whether all inputs are as wide as ``last``.
        says: anything else it says of itself, by name.
        dropped: names of what it holds that no other format has a place for.
    """

    dtype: str
    width: int
    hidden: int
    last: NormState | None = None
    spec: CaptureSpec | None = None
    uniform: bool = True
    says: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def slots(self) -> int | None:
        """How many states of ``hidden`` columns ``inputs`` are; None where they are of other widths."""
        return self.width // self.hidden if self.uniform and self.width % self.hidden == 0 else None


class Source(Protocol):
    """A dump opened for reading: sequences by number, in one fixed order."""

    @property
    def facts(self) -> Facts: ...

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """Where a sequence lies, for messages."""
        ...

    def notes(self) -> tuple[str, ...]:
        """What its user should know about the sequences read so far, a sentence each."""
        ...

    def tokens(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Token ids [T] int64 and marks [T] bool of one sequence, without looking at its states.

        Raises:
            StoreError: the file is damaged or malformed; names it.
        """
        ...

    def rows(self, index: int) -> Rows:
        """One sequence.

        Raises:
            StoreError: the file is damaged or malformed; names it.
        """
        ...


@dataclass(frozen=True, slots=True)
class DumpPlan:
    """What a writer needs to know besides the rows.

    Attributes:
        lengths: tokens of each sequence.
        last: norm state of ``Rows.last``, if it is known.
        source: where the rows come from, as the user named it.
        spec: the points, layers absolute, with the point that ``last`` is; None where nobody said them.
        target: path of the target model; None where it was not given.
        origin: the format that was read.
        digest: SHA-256 over token ids and masks, as `Provenance` has it; None where there are no masks.
    """

    lengths: tuple[int, ...]
    last: NormState | None
    source: str
    spec: CaptureSpec | None
    target: str | None
    origin: str
    digest: str | None


@runtime_checkable
class DumpFormat(Protocol):
    """One format; the core's and those contributed by ``capture_hooks_formats``."""

    @property
    def name(self) -> str: ...

    @property
    def meaning(self) -> DumpMeaning: ...

    @property
    def pickles(self) -> bool:
        """Whether its files are pickles, which are opened only on request."""
        ...

    @property
    def says_points(self) -> bool:
        """Whether its dumps name their target and points, so that a writer has to know them."""
        ...

    @property
    def resumes(self) -> bool:
        """Whether `write` goes on in a directory where it was interrupted; else it is given an empty one."""
        ...

    def recognises(self, directory: Path) -> bool:
        """Whether ``directory`` is of this format, judged without loading any pickle."""
        ...

    def open(self, directory: Path) -> Source:
        """Open a dump for reading.

        Raises:
            StoreError: it is damaged, or of another format.
        """
        ...

    def write(self, directory: Path, rows: Source, plan: DumpPlan) -> None:
        """Write every sequence of ``rows``, in order; masks are there, and states are what `meaning` wants.

        Raises:
            StoreError: the format has no place for them, or the system refused.
        """
        ...
