"""From one library's dump to another's: what must be known is known or asked for, then rows are streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...conventions import BUILTIN, Conventions
from ...errors import StoreError
from ...plugins import registry
from ...store.stream import view
from .contract import DumpFormat, Plan, Source
from .declared import Declared
from .describe import recognised
from .directory import fresh_directory
from .prepared import MaskSource, Prepared
from .settle import Settled, settle
from .target import TargetModel


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was done.

    Attributes:
        read_as, written_as: names of the two formats.
        sequences, tokens: how many.
        dtype: of the states, which no conversion changes.
        spec: the points in the order of their slots, as text; None where nobody said them.
        notes: what was computed, moved, left out or cannot be known, a sentence each.
    """

    read_as: str
    written_as: str
    sequences: int
    tokens: int
    dtype: str
    spec: str | None
    notes: tuple[str, ...]


def convert_dump(
    source: Path,
    destination: Path,
    *,
    to: str,
    read_as: str | None = None,
    declared: Declared = Declared(),  # noqa: B008  # immutable
    on_progress: Callable[[int, int], None] | None = None,
    conventions: Conventions = BUILTIN,
) -> Conversion:
    """Write the dump in ``source`` as a dump of another format in ``destination``.

    Args:
        source: a dump's directory.
        destination: a new or empty directory; where our own format is written, also one in which this
            conversion was interrupted.
        to: name of the format to write.
        read_as: name of the format to read; None to recognise it.
        declared: what the files do not say.
        on_progress: called with the sequences done and their number.
        conventions: what layer ids may mean.

    Raises:
        StoreError: anything that is not known and not declared, a file that is damaged, malformed or a pickle
            not asked for, states of another kind than the format takes, or a destination in use.
        SpecError, ConventionError: points that do not fit the target.
        ModelError: there is no such target.
    """
    reader = _reader(source, read_as, declared)
    writer: DumpFormat = registry().formats[to]
    if reader.name == writer.name:
        raise StoreError(f"{source} is a {to} dump already")
    opened = reader.open(source)
    target = None if declared.target is None else TargetModel(declared.target)
    settled = settle(reader, opened.facts, writer, declared, target, conventions)
    report = on_progress or (lambda done, total: None)
    lags = reader.meaning.mask_lag, writer.meaning.mask_lag
    prepared = Prepared(
        opened,
        masks=None if declared.masks is None else MaskSource(declared.masks),
        lags=_moving(lags) if declared.keep == "losses" else None,
        normed=target.normed if target is not None and settled.last != settled.written else None,
        vocabulary=None if target is None else target.anatomy.vocab_size,
        done=lambda done: report(done, len(opened)),
    )
    lengths, digest = _looked_through(prepared, wants_masks=lags[1] is not None)
    plan = Plan(lengths, settled.written, str(source), settled.spec, declared.target, reader.name, digest)
    if writer.resumes:
        writer.write(destination, prepared, plan)
    else:
        with fresh_directory(destination) as directory:
            writer.write(directory, prepared, plan)
    return Conversion(
        reader.name,
        writer.name,
        len(lengths),
        sum(lengths),
        opened.facts.dtype,
        None if settled.spec is None else str(settled.spec),
        (
            *settled.notes,
            *opened.notes(),
            *_mask_notes(reader, writer, declared),
            *_left_out(opened, writer, settled),
        ),
    )


def _reader(source: Path, read_as: str | None, declared: Declared) -> DumpFormat:
    """The format of ``source``, which may be opened.

    Raises:
        StoreError: it is of none, or a pickle that was not asked for.
    """
    reader: DumpFormat = recognised(source) if read_as is None else registry().formats[read_as]
    if reader.pickles and not declared.pickles:
        raise StoreError(
            f"{source} is a {reader.name} dump: its files are pickles, which are opened only on request "
            "(--pickles), then with weights_only=True and after a look at what they name"
        )
    return reader


def _looked_through(rows: Prepared, wants_masks: bool) -> tuple[tuple[int, ...], str | None]:
    """Tokens of each sequence, and the digest of all ids and masks (as `Examples.provenance` takes it).

    Everything but the states' values is looked at here, before anything is written.

    Raises:
        StoreError: ids that cannot be the target's, or masks that are wanted and not there.
    """
    lengths, digest, masked = [], hashlib.sha256(), True
    for index in range(len(rows)):
        ids, mask = rows.tokens(index)
        if mask is None and wants_masks:
            raise StoreError(
                f"{rows.place(index)} has no loss mask; state which tokens are to be learnt: --masks all, or "
                "--masks DATA, a data set with the same token ids"
            )
        lengths.append(len(ids))
        masked = masked and mask is not None
        for part in (len(ids).to_bytes(8, "little"), view(ids), view(mask) if mask is not None else b""):
            digest.update(part)
    return tuple(lengths), digest.hexdigest() if masked else None


def _moving(lags: tuple[int | None, int | None]) -> tuple[int, int] | None:
    """The two lags where they are there and differ."""
    old, new = lags
    return None if old is None or new is None or old == new else (old, new)


def _mask_notes(reader: DumpFormat, writer: DumpFormat, declared: Declared) -> Iterator[str]:
    old, new = reader.meaning, writer.meaning
    if new.mask_lag is None and old.mask_lag is not None:
        yield f"loss masks are left out: {new.about_mask}"
    if (lags := _moving((old.mask_lag, new.mask_lag))) is None:
        return
    if declared.keep == "losses":
        yield (
            f"marks are moved by {lags[0] - lags[1]:+d} tokens, so that the predictions that counted for "
            f"{old.library} count for {new.library}"
        )
        return
    yield (
        f"the same tokens are marked; {new.library} weights the prediction of x[p] by the mark of "
        f"{_token(lags[1])}, {old.library} by that of {_token(lags[0])}, so at the ends of marked spans "
        "other predictions count (--keep-mask losses keeps the predictions instead)"
    )


def _token(lag: int) -> str:
    return f"x[p-{lag}]" if lag else "x[p]"


def _left_out(opened: Source, writer: DumpFormat, settled: Settled) -> Iterator[str]:
    if opened.facts.dropped:
        yield f"left out, for {writer.name} has no place for it: {', '.join(opened.facts.dropped)}"
    if settled.last != settled.written:
        yield (
            f"the target's final norm was applied in float32 and rounded once to {opened.facts.dtype}; a "
            "target that runs in less than float32 rounds within its norm too, so its own states may "
            "differ in the last place"
        )
    if not writer.says_points:
        points = "which nobody stated" if settled.spec is None else f"which are {settled.spec}"
        yield f"the files do not say their points, {points}"
