"""Whether an engine makes an EAGLE-3 draft of what the file calls itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....conventions.facts import (
    ARCHITECTURES,
    ARCHITECTURES_FROM,
    MTP_FROM,
    MTP_TYPES,
    SPECULATORS_FROM,
    SPECULATORS_TYPES,
    cite,
)
from ..report import Finding, Row
from ..subject import Subject
from .seen import seen


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """The name in ``architectures``, or the nested type of a speculators head."""
    if subject.head is None:
        return
    makes = {view.engine for view in seen(subject)}
    if "vllm" in makes and subject.config.get("model_type") in MTP_TYPES:
        yield _taken_for_mtp(str(subject.config["model_type"]))
    for engine in ARCHITECTURES:
        if engine in makes:
            continue
        if subject.head.layout != "speculators":
            yield _unknown_name(engine, subject.config.get("architectures"))
        elif engine == "vllm":
            yield _unread(subject.config)
        else:
            yield _no_parser(engine)


def _taken_for_mtp(model_type: str) -> Finding:
    return Finding(
        check="architecture.model_type",
        severity="wrong",
        engines=("vllm",),
        what=f"model_type is {model_type}, which vLLM takes for DeepSeek's own MTP layer",
        why="it renames the architecture before it looks it up, finds no EAGLE-3 class by that and stops",
        do="write model_type = deepseek_v2",
        source=MTP_FROM,
    )


def _unknown_name(engine: str, architectures: Any) -> Finding:
    return Finding(
        check="architecture.name",
        severity="wrong",
        engines=(engine,),
        what=f"architectures is {str(architectures)[:80]!r}, of which {engine} makes no EAGLE-3 draft",
        why=f"it makes one of {', '.join(ARCHITECTURES[engine])}",
        do="name the architecture that this engine knows, if the tensors are of that kind",
        source=ARCHITECTURES_FROM[engine],
    )


def _unread(config: Mapping[str, Any]) -> Finding:
    if config.get("speculators_config") is None:
        return Finding(
            check="architecture.layout",
            severity="wrong",
            engines=("vllm",),
            what="the layout is speculators', and there is no speculators_config",
            why="by which vLLM knows it; it reads the file as a raw head, and finds none of its fields",
            do="restore speculators_config, or convert the head to a raw layout (capture-hooks convert)",
            source=SPECULATORS_FROM,
        )
    nested = config.get("transformer_layer_config")
    kind = nested.get("model_type") if isinstance(nested, dict) else None
    return Finding(
        check="architecture.name",
        severity="wrong",
        engines=("vllm",),
        what=f"transformer_layer_config.model_type is {str(kind)[:80]!r}, of which vllm makes no EAGLE-3 "
        f"draft",
        why=f"it makes one of {', '.join(SPECULATORS_TYPES)}",
        do="convert the head to a raw layout (capture-hooks convert)",
        source=SPECULATORS_FROM,
    )


def _no_parser(engine: str) -> Finding:
    places = {
        "sglang": "srt (no reader of transformer_layer_config)",
        "specforge": "specforge/modeling/auto.py",
    }
    return Finding(
        check="architecture.layout",
        severity="wrong",
        engines=(engine,),
        what=f"{engine} does not read the speculators layout",
        why="the draft's fields lie in transformer_layer_config, where it does not look",
        do="convert the head to the layout of that engine (capture-hooks convert)",
        source=cite(engine, places[engine]),
    )
