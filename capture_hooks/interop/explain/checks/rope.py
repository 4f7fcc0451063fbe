"""Rotary positions: the head's against its own two spellings, and against the target's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ....conventions.facts import cite
from ....errors import HeadError
from ....heads.schema import HeadSchema
from ..report import Finding, Row
from ..subject import Subject
from .writers import by_modelopt

#: What ModelOpt's exporter puts into a head trained without scaling, unless it is told not to.
_INJECTED: Final = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
_DEFAULT_THETA: Final = 10000.0


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """``rope_theta`` and scaling."""
    if subject.head is None:
        return
    fields = subject.head.fields
    theta, kind, settings = rope_of(fields)
    yield from _two_spellings(fields, subject.head.schema)
    if subject.facts.config is not None:
        their_theta, their_kind, theirs = rope_of(subject.facts.config)
        if theta != their_theta:
            yield _theta(theta, their_theta)
        if kind != their_kind:
            yield _scaling(kind, their_kind, bool(theirs), _is_injected(settings, subject))
    elif _is_injected(settings, subject):
        yield _scaling("yarn", None, False, True)


def rope_of(config: Mapping[str, Any]) -> tuple[float | None, str, Mapping[str, Any]]:
    """Base, kind of scaling (``"default"`` for none) and settings, as transformers 5 reads a config.

    ``rope_scaling`` takes the place of ``rope_parameters`` where both are there (5.19 to 5.24,
    ``modeling_rope_utils.py``, ``rope_scaling or self.rope_parameters``).  A base in the settings comes
    before the top-level ``rope_theta``; it is None where neither says it.
    """
    spellings = (config.get("rope_scaling"), config.get("rope_parameters"))
    settings = next((said for said in spellings if isinstance(said, Mapping) and said), {})
    theta = settings.get("rope_theta", config.get("rope_theta"))
    kind = settings.get("rope_type", settings.get("type", "default"))
    number = float(theta) if isinstance(theta, int | float) and not isinstance(theta, bool) else None
    return number, "default" if kind in ("default", "mrope", None) else str(kind), settings


def _two_spellings(fields: Mapping[str, Any], schema: HeadSchema) -> Iterator[Finding]:
    spellings = [fields.get(name) for name in ("rope_parameters", "rope_scaling")]
    if not all(said is None or isinstance(said, Mapping) for said in spellings):
        return
    theta, kind, _ = rope_of(fields)
    try:
        settled = schema.rope(fields, "the config")
    except HeadError as error:
        what = str(error).removeprefix("the config: ")
    else:
        if settled["rope_theta"] == (theta or _DEFAULT_THETA):
            return
        what = f"the base {settled['rope_theta']!r} stands in rope_parameters alone, beside a rope_scaling"
    base = f"{_DEFAULT_THETA:g}" if theta is None else f"{theta:g}"
    yield Finding(
        check="rope.two_spellings",
        severity="wrong",
        what=what,
        why="transformers 5 takes rope_scaling in the place of rope_parameters, and a base in either before "
        f"rope_theta: {kind} by a base of {base} here; other readers take the other one",
        do="write what the head was trained with, the same in every place",
    )


def _theta(ours: float | None, theirs: float | None) -> Finding:
    said = f"{_DEFAULT_THETA:g} (not said)" if ours is None else f"{ours:g}"
    target = f"{_DEFAULT_THETA:g} (not said)" if theirs is None else f"{theirs:g}"
    same = (ours or _DEFAULT_THETA) == (theirs or _DEFAULT_THETA)
    return Finding(
        check="rope.theta",
        severity="note" if same else "warning",
        what=f"the head's rope_theta is {said}, the target's {target}",
        why="a head has its own positions, so this may be how it was trained; but trainers have left the "
        "target's base out when writing a head, and readers then take 10000",
        do="write the base that the head was trained with",
    )


def _scaling(ours: str, theirs: str | None, target_scales: bool, injected: bool) -> Finding:
    target = "" if theirs is None else f", and the target's is {theirs}"
    if injected:
        return Finding(
            check="rope.injected",
            severity="warning",
            engines=("sglang", "vllm"),
            what=f"rope_scaling is yarn by a factor of 32 from 2048 positions{target}",
            why="ModelOpt's exporter writes it into heads that were trained without scaling, for long "
            "contexts; servers apply it at every length",
            do="compare acceptance with rope_scaling removed; at export eagle_export_rope_scaling = {} "
            "leaves it out",
            source=cite(
                "modelopt",
                "modelopt/torch/speculative/config.py:380-387, "
                "modelopt/torch/export/plugins/hf_spec_export.py:213-218",
            ),
        )
    return Finding(
        check="rope.scaling",
        severity="warning",
        what=f"the head's RoPE scaling is {ours}{target}",
        why="a head has its own positions, so this may be how it was trained; over long contexts the two "
        "then drift" + (" apart" if target_scales or ours != "default" else ""),
        do="write the scaling that the head was trained with",
    )


def _is_injected(settings: Mapping[str, Any], subject: Subject) -> bool:
    assert subject.head is not None
    return by_modelopt(subject.head) and all(settings.get(key) == value for key, value in _INJECTED.items())
