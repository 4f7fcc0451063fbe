"""From one library's dump to another's: settle what the files do not say, then stream the rows."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ...capture.anatomy import Anatomy
from ...conventions import BUILTIN, Conventions
from ...errors import CaptureHooksError, StoreError
from ...spec import CaptureSpec, Point
from ...store.data import read_examples
from ...store.shard import view
from ...target import final_norm_of, hollow_anatomy
from .contract import DumpFormat, DumpPlan, Facts, NormState, Rows, Source
from .describe import FORMATS, recognised
from .files import fresh_directory


@dataclass(frozen=True, slots=True)
class Declared:
    """Statements that a conversion may need; a missing one is asked for by an error that names the choices.

    Attributes:
        spec: the captured inputs in the order of their slots (``--spec``).  Its target point counts only
            where it is not ``final_norm``, the default of the text form.
        ids: instead, the layer ids that were given to the program that wrote the dump (``--ids``), and
        written_for: the convention they follow (``--written-for``), by its name.
        last: norm state of the last hidden state (``--last``).
        masks: where a dump has no loss mask: ``"all"`` tokens are to be learnt, or a data set whose records
            have the same token ids (``--masks all|DATA``).
        keep: what of a loss mask stays the same where two libraries' trainers apply it with another lag:
            ``"marks"``, the tokens that are marked, or ``"losses"``, the predictions that count
            (``--keep-mask``).
        target: path of the target model (``--target``).
        pickles: open .pt and .ckpt files (``--pickles``), with ``weights_only=True`` and after a check that
            they name nothing but tensors.
    """

    spec: CaptureSpec | None = None
    ids: tuple[int, ...] | None = None
    written_for: str | None = None
    last: NormState | None = None
    masks: Literal["all"] | Path | None = None
    keep: Literal["marks", "losses"] = "marks"
    target: str | None = None
    pickles: bool = False


@dataclass(frozen=True, slots=True)
class DumpConversion:
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
    declared: Declared = Declared(),  # immutable
    on_progress: Callable[[int, int], None] | None = None,
    conventions: Conventions = BUILTIN,
    formats: Mapping[str, DumpFormat] = FORMATS,
) -> DumpConversion:
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
        formats: what ``to`` and ``read_as`` may name, and what is recognised.

    Raises:
        StoreError: anything that is not known and not declared, a file that is damaged, malformed or a pickle
            not asked for, states of another kind than the format takes, or a destination in use.
        SpecError, ConventionError: points that do not fit the target.
        ModelError: there is no such target.
    """
    reader = recognised(source, formats) if read_as is None else _named(read_as, formats)
    if reader.pickles and not declared.pickles:
        raise StoreError(
            f"{source} is a {reader.name} dump: its files are pickles, which are opened only on request "
            "(--pickles), then with weights_only=True and after a look at what they name"
        )
    writer = _named(to, formats)
    if reader.name == writer.name:
        raise StoreError(f"{source} is a {to} dump already")
    opened = reader.open(source)
    target = None if declared.target is None else _HollowTarget(declared.target)
    settled = _settle(reader, opened.facts, writer, declared, target, conventions)
    report = on_progress or (lambda done, total: None)
    lags = reader.meaning.mask_lag, writer.meaning.mask_lag
    prepared = _Prepared(
        source=opened,
        masks=None if declared.masks is None else _Masks(declared.masks),
        lags=_moving(lags) if declared.keep == "losses" else None,
        normed=target.normed if target is not None and settled.last != settled.written else None,
        vocabulary=None if target is None else target.anatomy.vocab_size,
        done=lambda done: report(done, len(opened)),
    )
    lengths, digest = _looked_through(prepared, wants_masks=lags[1] is not None)
    plan = DumpPlan(lengths, settled.written, str(source), settled.spec, declared.target, reader.name, digest)
    if writer.resumes:
        writer.write(destination, prepared, plan)
    else:
        with fresh_directory(destination) as directory:
            writer.write(directory, prepared, plan)
    return DumpConversion(
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


def _named(name: str, formats: Mapping[str, DumpFormat]) -> DumpFormat:
    """The format of a name.

    Raises:
        StoreError: there is none.
        PluginError: instead, where the formats are those that are installed, which say it themselves.
    """
    try:
        return formats[name]
    except CaptureHooksError:
        raise
    except KeyError:
        raise StoreError(f"no format is called {name!r}; there are {', '.join(formats)}") from None


def _looked_through(rows: _Prepared, wants_masks: bool) -> tuple[tuple[int, ...], str | None]:
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


@dataclass(frozen=True, slots=True)
class _Settled:
    """What a conversion does to the states.

    Attributes:
        last: norm state of the last hidden state as it is read.
        written: as it is written.
        spec: the points with the target point that is written; None where nobody said them.
        notes: what the user should know, a sentence each.
    """

    last: NormState
    written: NormState
    spec: CaptureSpec | None
    notes: tuple[str, ...]


def _settle(
    source: DumpFormat,
    facts: Facts,
    destination: DumpFormat,
    declared: Declared,
    target: _HollowTarget | None,
    conventions: Conventions,
) -> _Settled:
    """Put together what files and user say.

    Raises:
        StoreError: something is not known, or the two contradict each other; the message says what to state.
        SpecError, ConventionError: the points do not fit the target.
    """
    spec = _spec(facts, declared, target, conventions)
    if destination.says_points and target is None:
        raise StoreError(f"a {destination.name} dump names its target: --target MODEL says which one it was")
    if destination.says_points and spec is None:
        raise StoreError(
            "the dump does not say which points its states are; state them in the order of their slots: "
            '--spec "post.2, post.15, post.26", or --ids 2,15,26 --written-for CONVENTION'
        )
    last, notes = _as_read(source, facts, declared, target)
    written = _as_written(last, destination, target)
    if spec is not None and target is not None:
        end = _FINAL_NORM if written == "normed" else Point.post(target.anatomy.n_layers - 1)
        spec = CaptureSpec(spec.absolute(target.anatomy.n_layers).inputs, end)
        target.check(facts, spec)
    return _Settled(last, written, spec, notes)


_FINAL_NORM = Point("final_norm")


def _as_read(
    source: DumpFormat, facts: Facts, declared: Declared, target: _HollowTarget | None
) -> tuple[NormState, tuple[str, ...]]:
    """The norm state of the last hidden state; a note where the user overrules the library's own reading."""
    implied = _stated_by_points(declared, facts, target)
    if implied is not None and declared.last is not None and implied != declared.last:
        raise StoreError(f"the points stated end in the {implied} stream, but --last says {declared.last}")
    if facts.spec is not None and facts.last is None:
        raise StoreError(
            f"the dump's target point is {facts.spec.target}: every other format holds the end of the stream"
        )
    meaning, stated = source.meaning, declared.last or implied
    last = facts.last or stated or meaning.last
    if last is None:
        raise StoreError(
            "the dump does not say whether its last hidden state has passed the target's final norm: "
            f"{meaning.about_last}; state it: --last normed, or --last unnormed"
        )
    if stated is not None and stated != last:
        raise StoreError(f"the dump itself says that its last hidden state is {last}, not {stated}")
    if meaning.last in (None, last):
        return last, ()
    return last, (
        f"the last hidden state is taken for {last}, as stated; {meaning.library} itself takes it for "
        f"{meaning.last}: {meaning.about_last}",
    )


def _as_written(last: NormState, destination: DumpFormat, target: _HollowTarget | None) -> NormState:
    """The norm state that the destination holds, which the dump has or the target's norm gives."""
    wanted, why = destination.meaning.wants or last, destination.meaning.about_last
    if last == "normed" and wanted == "unnormed":
        raise StoreError(
            f"{destination.name} holds the un-normed end of the stream ({why}), the dump the normed one: a "
            "norm cannot be undone; dump the un-normed state (a spec that ends in '-> post.-1')"
        )
    if last != wanted and target is None:
        raise StoreError(
            f"{destination.name} holds the normed last hidden state ({why}), the dump the un-normed one: "
            "--target MODEL names the model whose final norm is to be applied"
        )
    return wanted


def _spec(
    facts: Facts, declared: Declared, target: _HollowTarget | None, conventions: Conventions
) -> CaptureSpec | None:
    """The points of the inputs, from the options, the file or the ids, without the target point."""
    if declared.spec is not None and declared.ids is not None:
        raise StoreError("points are stated once: by --spec, or by --ids and --written-for")
    stated = (
        declared.spec if declared.ids is None else CaptureSpec(_points(facts, declared, target, conventions))
    )
    if facts.spec is None or stated is None:
        return stated or facts.spec
    if target is None:
        raise StoreError(
            "the dump itself says its points; leave --spec and --ids out, or compare with --target"
        )
    n_layers, split = target.anatomy.n_layers, target.anatomy.split_boundaries
    if facts.spec.resolve(n_layers, split).inputs != stated.resolve(n_layers, split).inputs:
        raise StoreError(f"the dump itself says that its points are {facts.spec}, not {stated}")
    return facts.spec


def _points(
    facts: Facts, declared: Declared, target: _HollowTarget | None, conventions: Conventions
) -> tuple[Point, ...]:
    """The inputs that ids mean; ids may name the last hidden state too, behind them."""
    assert declared.ids is not None
    if declared.written_for is None:
        raise StoreError(
            f"ids {list(declared.ids)} mean other states to each library: --written-for names the convention"
        )
    if target is None:
        raise StoreError("ids count from a model's layers: --target MODEL names the model")
    points = conventions[declared.written_for].to_points(declared.ids, target.anatomy.n_layers)
    slots = facts.slots
    if slots is not None and len(points) == slots + 1 and _is_end(points[-1], target):
        return points[:-1]
    if len(points) != slots:
        raise StoreError(
            f"ids {list(declared.ids)} are {len(points)} points to {declared.written_for} "
            f"({', '.join(map(str, points))}), but the dump holds inputs of {facts.width} columns and a "
            f"last hidden state of {facts.hidden}"
        )
    return points


def _stated_by_points(declared: Declared, facts: Facts, target: _HollowTarget | None) -> NormState | None:
    """The norm state that points imply: ``-> post.-1``, or one id more than there are inputs."""
    if declared.ids is not None and facts.slots is not None and len(declared.ids) == facts.slots + 1:
        return "unnormed"
    if declared.spec is None or declared.spec.target == _FINAL_NORM:
        return None
    if declared.spec.target == Point.post(-1) or (
        target is not None and _is_end(declared.spec.target, target)
    ):
        return "unnormed"
    raise StoreError(
        f"the target point of {declared.spec} is not known to be the end of the stream: leave it out and "
        "state --last, or give --target"
    )


def _is_end(point: Point, target: _HollowTarget) -> bool:
    return (
        point.resolve(target.anatomy.n_layers, target.anatomy.split_boundaries).boundary
        == target.anatomy.n_layers
    )


class _HollowTarget:
    """A target by the path of its checkpoint; each part of it is read when it is first needed.

    Raises:
        ModelError: there is no such model.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def anatomy(self) -> Anatomy:
        """The anatomy of the model, built without its weights."""
        return hollow_anatomy(self.model)

    def check(self, facts: Facts, spec: CaptureSpec) -> None:
        """Whether states can be this model's.

        Raises:
            StoreError: they are of another width, or not as many as the points.
            SpecError: a point is not in this model.
        """
        spec.resolve(self.anatomy.n_layers, self.anatomy.split_boundaries)
        if facts.hidden != self.anatomy.hidden_size:
            raise StoreError(
                f"the dump's last hidden state has {facts.hidden} columns, {self.model} a stream of "
                f"{self.anatomy.hidden_size}: it is of another target"
            )
        if facts.slots != len(spec):
            raise StoreError(
                f"{spec} names {len(spec)} points, but the dump's inputs are {facts.width} columns wide, "
                f"{facts.width / facts.hidden:g} times the hidden size"
            )

    @cached_property
    def final_norm(self) -> nn.Module:
        """The norm before ``lm_head``, in float32.

        Raises:
            ModelError: the family has none.
        """
        return final_norm_of(self.model, torch.float32)

    @torch.no_grad()
    def normed(self, last: Tensor) -> Tensor:
        """The final norm of un-normed states [T, H]: computed in float32, rounded once to their dtype."""
        normed: Tensor = self.final_norm(last.float())
        return normed.to(last.dtype)


class _Masks:
    """Where masks come from for dumps that have none: all tokens, or a data set's record of the same ids.

    Raises:
        DataError: the data set cannot be used.
    """

    def __init__(self, masks: Literal["all"] | Path) -> None:
        self._path = masks if isinstance(masks, Path) else None
        self._by_ids: dict[bytes, Tensor] = {}
        if self._path is not None:
            examples = read_examples(self._path)
            self._by_ids = {bytes(view(example.token_ids)): example.loss_mask for example in examples}

    def of(self, place: str, ids: Tensor) -> Tensor:
        """The mask [T] of one sequence.

        Raises:
            StoreError: no record has these ids.
        """
        if self._path is None:
            return torch.ones(len(ids), dtype=torch.bool)
        if (mask := self._by_ids.get(bytes(view(ids.contiguous())))) is None:
            raise StoreError(
                f"{place}: no record of {self._path} has the same token ids, so its mask is unknown"
            )
        return mask


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A `Source` over another one: its rows as the destination wants them, every token id looked at.

    Attributes:
        source: what is read.
        masks: for dumps without masks; None where they have them.
        lags: mask lags of source and destination, where losses are to stay the same; None to keep the marks.
        normed: applied to the last hidden state; None to leave it.
        vocabulary: ids below it are the target's; None where that is not known.
        done: called with the number of sequences read so far.
    """

    source: Source
    masks: _Masks | None
    lags: tuple[int, int] | None
    normed: Callable[[Tensor], Tensor] | None
    vocabulary: int | None
    done: Callable[[int], None]

    @property
    def facts(self) -> Facts:
        return self.source.facts

    def __len__(self) -> int:
        return len(self.source)

    def place(self, index: int) -> str:
        return self.source.place(index)

    def notes(self) -> tuple[str, ...]:
        return self.source.notes()

    def tokens(self, index: int) -> tuple[Tensor, Tensor | None]:
        ids, mask = self.source.tokens(index)
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or (self.vocabulary is not None and most >= self.vocabulary):
            limit = "" if self.vocabulary is None else f" of {self.vocabulary}"
            raise StoreError(
                f"{self.place(index)}: token ids from {least} to {most} do not fit a vocabulary{limit}: "
                "the dump is damaged, or of another model or tokenizer"
            )
        return ids, self._mask(self.place(index), ids, mask)

    def rows(self, index: int) -> Rows:
        rows = self.source.rows(index)
        mask = self._mask(rows.place, rows.token_ids, rows.loss_mask)
        last = rows.last if self.normed is None else self.normed(rows.last)
        self.done(index + 1)
        return dataclasses.replace(rows, loss_mask=mask, last=last)

    def _mask(self, place: str, ids: Tensor, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None if self.masks is None else self.masks.of(place, ids)
        if self.masks is not None:
            raise StoreError(f"{place} has a loss mask of its own; leave --masks out")
        return mask if self.lags is None else same_losses(mask, *self.lags, place)


def same_losses(mask: Tensor, lag: int, new_lag: int, place: str) -> Tensor:
    """The mask [T] under which a trainer of ``new_lag`` counts the predictions that one of ``lag`` counts.

    Every library's own data preparation marks tokens: ``loss_mask[t]`` is 1 where x[t] was written by the
    assistant.  Their trainers differ in which prediction a mark decides: the one of x[p] is weighted by
    ``loss_mask[p - lag]``, with the lag of `DumpMeaning.mask_lag`.  So either the marks stay the same, or the
    losses.

    A head's row t predicts x[t+2] and later ones, so nothing is predicted before x[2]; the last prediction is
    that of x[T], whose distribution the target's last row gives although the token is not there.

    Raises:
        StoreError: a prediction counts that the other trainer has no mark for.
    """
    tokens = len(mask)
    predicted = mask.nonzero().flatten() + lag
    marked = predicted[(predicted >= 2) & (predicted <= tokens)] - new_lag
    if bool((marked >= tokens).any()):
        raise StoreError(
            f"{place}: its mask counts the prediction of what follows the last token, which a trainer of the "
            "destination never makes, so that loss would be lost; keep the marks instead (--keep-mask marks)"
        )
    moved = torch.zeros_like(mask)
    moved[marked] = True
    return moved


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


def _left_out(opened: Source, writer: DumpFormat, settled: _Settled) -> Iterator[str]:
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
