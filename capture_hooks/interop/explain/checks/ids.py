"""The layer ids, and whether ``fc`` has a column for each state that they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch

from ....conventions import Conventions, convention_for
from ....conventions.facts import SERVERS, Draft, cite, counted_by, fc_inputs, limits
from ....conventions.readers import NESTED, TOP
from ....errors import CaptureHooksError
from ....spec import Point
from ..compare import differences
from ..report import Finding, KnownTarget, Row
from ..subject import HeadSubject, Subject
from ..trained import whole_numbers
from .seen import EngineView, seen, tensor

_ORDER: Final = cite("vllm", "model_executor/models/interfaces.py (tuple(sorted(set(layers))))")
#: What becomes of text, null and the like among the ids, and of what Python counts as a number.
_MEETS: Final = (
    "no reader converts it: a setter that adds 1 fails, one that does not never meets it in its loop"
)
_COMPARES: Final = (
    "Python takes 2.0 for 2 and true for 1, so some readers capture a layer for it all the same (the table "
    "shows which), and others fail"
)


def check_ids(subject: Subject) -> Iterator[Finding]:
    """Types, order, duplicates; and the nested list against the top-level one."""
    for key, ids in subject.ids.items():
        if not _is_refusal(subject, key):
            yield from _one(key, ids)
    if NESTED in subject.ids and TOP in subject.ids and not _refused(subject):
        yield from _both(subject.ids, subject.facts.target, subject.known.conventions)


def _one(key: str, ids: Any) -> Iterator[Finding]:
    if not isinstance(ids, list):
        yield _bad(
            key, f"is {_short(ids)}, not a list", "a setter that iterates over it fails or takes its letters"
        )
        return
    if not ids:
        yield Finding(
            check="ids.empty",
            severity="warning",
            what=f"{key} is an empty list",
            why="vLLM takes it for a missing list: its first runner goes on to the other key and then to its "
            "default layers; SGLang's setters take it as it stands and capture nothing, or fail on its first "
            "element",
            do=f"write the ids into {key}, or remove it",
        )
        return
    strange = [number for number in ids if type(number) is not int]
    if strange:
        why = _COMPARES if all(_is_whole(number) for number in strange) else _MEETS
        yield _bad(key, f"holds {_short(strange[0])}, not an integer", why)
        return
    if twice := sorted({number for number in ids if ids.count(number) > 1}):
        yield Finding(
            check="ids.duplicate",
            severity="wrong",
            what=f"{key} = {ids} names {twice[0]} more than once",
            why="a state is captured once, so fewer states are fed than fc has inputs for",
            do="name each state once, and sum fc's columns of the two",
            source=_ORDER,
        )
    if sorted(ids) != ids:
        yield Finding(
            check="ids.unsorted",
            severity="warning",
            what=f"{key} = {ids} does not ascend",
            why="servers concatenate by depth, whatever the order of the ids; a trainer that kept the "
            "list's order trained fc on other columns",
            do="sort the ids and permute fc's columns along (capture-hooks convert does both)",
            source=_ORDER,
        )
    if ids and min(ids) < 0:
        yield Finding(
            check="ids.negative",
            severity="warning",
            what=f"{key} = {ids} has a negative id",
            why="no server counts from the end: SGLang adds one to it (-1 becomes the embedding), vLLM "
            "captures nothing for it",
            do="write absolute ids",
        )


def _both(ids: Mapping[str, Any], target: KnownTarget, conventions: Conventions) -> Iterator[Finding]:
    """SGLang reads the nested list alone, vLLM the top-level one first: do they name the same states?"""
    told = f"{NESTED} = {_short(ids[NESTED])} and {TOP} = {_short(ids[TOP])}"
    if target.family is None or target.n_layers is None:
        yield Finding(
            check="ids.two_lists",
            severity="note",
            what=f"the file has two lists: {told}",
            why="SGLang reads the nested one by its own rule and vLLM the other; whether they name the same "
            "states depends on the target",
            do="give --target, or --family and --layers",
        )
        return
    try:
        nested = _points("sglang", NESTED, ids, target.family, target.n_layers, conventions)
        top = _points("vllm", TOP, ids, target.family, target.n_layers, conventions)
        found = differences(nested, top, target.n_layers)
    except CaptureHooksError as error:
        yield Finding(
            check="ids.two_lists",
            severity="warning",
            what=f"the file has two lists: {told}",
            why=f"they cannot be compared: {error}",
            do="see the table for what each engine captures",
        )
        return
    if found:
        yield Finding(
            check="ids.two_lists",
            severity="wrong",
            what=f"the two lists disagree: {told}",
            why=f"to SGLang the first is {_list(nested)}, to vLLM the second is {_list(top)}: "
            f"{'; '.join(found)}",
            do="keep the list that the head was trained with and derive the other from it",
        )


def _points(
    library: str, key: str, ids: Mapping[str, Any], family: str, n_layers: int, conventions: Conventions
) -> tuple[Point, ...]:
    chosen = convention_for(library, family, key, known=conventions)
    return chosen.to_points(whole_numbers(key, ids[key]), n_layers)


def _refused(subject: Subject) -> bool:
    """Whether one of our own heads keeps an engine out by a list that it cannot read."""
    return _is_refusal(subject, NESTED) or _is_refusal(subject, TOP)


def _is_refusal(subject: Subject, key: str) -> bool:
    if subject.head is None or subject.head.section is None:
        return False
    return any(statement.key == key and not statement.right for statement in subject.head.section.engines)


def _bad(key: str, what: str, why: str) -> Finding:
    return Finding(
        check="ids.type",
        severity="wrong",
        what=f"{key} {what}",
        why=why,
        do="write a list of whole numbers",
    )


def _is_whole(value: Any) -> bool:
    """Whether Python finds a value equal to some integer: 2.0, or true."""
    return isinstance(value, bool) or (isinstance(value, float) and value.is_integer())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _list(points: Sequence[Point]) -> str:
    return ", ".join(map(str, points))


def check_inputs(subject: HeadSubject, rows: Sequence[Row]) -> Iterator[Finding]:
    """The width of ``fc``, the count that the config gives, and what is captured."""
    width = _fc_width(subject)
    target = _target_width(subject)
    if width is None or target is None:
        return
    if subject.head.flags.use_aux_hidden_state is False:
        yield Finding(
            check="inputs.fc_unused",
            severity="wrong",
            engines=SERVERS,
            what="the head has an fc, and eagle_config.use_aux_hidden_state is false",
            why="engines then feed it the final state alone, and apply no fc to it",
            do="write use_aux_hidden_state = true if the head was trained on states of several layers",
            source=f"{cite('vllm', 'model_executor/models/llama_eagle3.py:401-402,462-463')}; "
            f"{limits('one_input')[0].sources['llama']}",
        )
        return
    if width % target:
        yield Finding(
            check="inputs.width",
            severity="wrong",
            what=f"fc has {width} columns, no multiple of the target's width {target}",
            why="fc eats whole hidden states of the target",
            do="check target_hidden_size, and that the head belongs to this target",
        )
        return
    trained = width // target
    for view in seen(subject):
        if view.engine in SERVERS:
            yield from _built(view, trained)
    yield from _fed(subject, rows, trained, target)


def _built(view: EngineView, trained: int) -> Iterator[Finding]:
    built, source = fc_inputs(view.engine, view.draft, view.config)
    if built == trained:
        return
    do = f"write num_aux_hidden_states = {trained} at the top level"
    if "num_aux_hidden_states" not in counted_by(view.engine, view.draft):
        do = "write all ids into eagle_config.eagle_aux_hidden_state_layer_ids"
    yield Finding(
        check="inputs.built",
        severity="wrong",
        engines=(view.engine,),
        what=f"{view.engine} builds fc for {built} states, and the file's fc has {trained}",
        why="it takes the number from the config, where it reads num_aux_hidden_states or counts ids under "
        "some keys only; loading the weight fails on its shape",
        do=do,
        source=source,
    )


def _fed(subject: HeadSubject, rows: Sequence[Row], trained: int, target: int) -> Iterator[Finding]:
    """What the rows capture; those of one library that capture as many states are one finding."""
    read = [row for row in rows if row.captured is not None and row.asked == "file"]
    for (library, fed), group in groupby(read, lambda row: (row.library, len(row.captured or ()))):
        alike = list(group)
        draft = _draft(subject, library)
        skips = library == "sglang" and fed * target == _own_width(subject) and draft is not None
        if skips and not _is_identity(subject):
            assert draft is not None
            yield _skipped(alike, draft, trained, fed)
        elif fed != trained and not skips:
            yield Finding(
                check="inputs.fed",
                severity="wrong",
                engines=_names(alike),
                what=f"{', '.join(_names(alike))}: {fed} states captured, and fc eats {trained}",
                why=f"{fed * target} columns meet a matrix of {trained * target}: the first forward pass "
                f"fails",
                do=alike[0].instead or "give it as many ids as fc has inputs",
                source=alike[0].source,
            )


def _skipped(rows: Sequence[Row], draft: Draft, trained: int, fed: int) -> Finding:
    (limit,) = limits("one_input")
    raw = "" if fed == trained else ". Nothing fails: the head runs on the raw state"
    return Finding.of_limit(limit, draft, _names(rows), trained=trained, raw=raw)


def _names(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.engine for row in rows)


def _fc_width(subject: HeadSubject) -> int | None:
    info = subject.head.tensors.get("fc.weight")
    return info.shape[1] if info is not None and len(info.shape) == 2 else None


def _target_width(subject: HeadSubject) -> int | None:
    """Columns of one state: the target's own width, else what the head says, else the head's width."""
    if subject.facts.target.hidden_size is not None:
        return subject.facts.target.hidden_size
    for name in ("target_hidden_size", "hidden_size"):
        value = subject.head.fields.get(name)
        if value is None:
            value = subject.config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _own_width(subject: HeadSubject) -> int | None:
    value = subject.head.fields.get("hidden_size")
    return value if type(value) is int else None


def _is_identity(subject: HeadSubject) -> bool:
    """Whether ``fc`` does nothing, so that skipping it does nothing."""
    shape = subject.head.tensors["fc.weight"].shape
    if shape[0] != shape[1]:
        return False
    fc = tensor(subject.head, "fc.weight")
    return torch.equal(fc, torch.eye(len(fc), dtype=fc.dtype))


def _draft(subject: HeadSubject, engine: str) -> Draft | None:
    return next((view.draft for view in seen(subject) if view.engine == engine), None)
