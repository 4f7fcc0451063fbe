"""``fc``'s width against the number of states that each engine captures, and that it builds ``fc`` for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from ....conventions.facts import SERVERS, Draft, cite, counted_by, fc_inputs, limits
from ..report import Finding, Row
from ..subject import Subject
from .reading import tensor
from .seen import Seen, seen


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """The width of ``fc``, the count that the config gives, and what is captured."""
    if subject.head is None:
        return
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


def _built(view: Seen, trained: int) -> Iterator[Finding]:
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


def _fed(subject: Subject, rows: Sequence[Row], trained: int, target: int) -> Iterator[Finding]:
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


def _fc_width(subject: Subject) -> int | None:
    assert subject.head is not None
    info = subject.head.tensors.get("fc.weight")
    return info.shape[1] if info is not None and len(info.shape) == 2 else None


def _target_width(subject: Subject) -> int | None:
    """Columns of one state: the target's own width, else what the head says, else the head's width."""
    assert subject.head is not None
    if subject.facts.target.hidden_size is not None:
        return subject.facts.target.hidden_size
    for name in ("target_hidden_size", "hidden_size"):
        value = subject.head.fields.get(name)
        if value is None:
            value = subject.config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _own_width(subject: Subject) -> int | None:
    assert subject.head is not None
    value = subject.head.fields.get("hidden_size")
    return value if type(value) is int else None


def _is_identity(subject: Subject) -> bool:
    """Whether ``fc`` does nothing, so that skipping it does nothing."""
    assert subject.head is not None
    shape = subject.head.tensors["fc.weight"].shape
    if shape[0] != shape[1]:
        return False
    fc = tensor(subject.head, "fc.weight")
    return torch.equal(fc, torch.eye(len(fc), dtype=fc.dtype))


def _draft(subject: Subject, engine: str) -> Draft | None:
    return next((view.draft for view in seen(subject) if view.engine == engine), None)
