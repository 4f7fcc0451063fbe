"""What has to be known before a dump can be converted: from its files, from the user, or asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ...conventions import Conventions
from ...errors import StoreError
from ...spec import CaptureSpec, Point
from .contract import DumpFormat, Facts, NormState
from .declared import Declared
from .target import TargetModel

_FINAL_NORM = Point("final_norm")


@dataclass(frozen=True, slots=True)
class Settled:
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


def settle(
    source: DumpFormat,
    facts: Facts,
    destination: DumpFormat,
    declared: Declared,
    target: TargetModel | None,
    conventions: Conventions,
) -> Settled:
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
    return Settled(last, written, spec, notes)


def _as_read(
    source: DumpFormat, facts: Facts, declared: Declared, target: TargetModel | None
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


def _as_written(last: NormState, destination: DumpFormat, target: TargetModel | None) -> NormState:
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
    facts: Facts, declared: Declared, target: TargetModel | None, conventions: Conventions
) -> CaptureSpec | None:
    """The points, from whoever says them; the target point is another matter."""
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
    facts: Facts, declared: Declared, target: TargetModel | None, conventions: Conventions
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


def _stated_by_points(declared: Declared, facts: Facts, target: TargetModel | None) -> NormState | None:
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


def _is_end(point: Point, target: TargetModel) -> bool:
    return (
        point.resolve(target.anatomy.n_layers, target.anatomy.split_boundaries).boundary
        == target.anatomy.n_layers
    )
