"""Tensors that an engine's draft class has parameters for: each stored, in the shape that it builds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ....conventions.facts import SERVERS, cite, fc_inputs, flag_rule
from ...heads import RawHead
from ..report import Finding, Row
from ..subject import Subject
from .seen import Seen, seen

Shape = tuple[int, ...]
#: Their absence has other meanings and checks of its own (`weights`, `vocabulary`).
_ELSEWHERE: Final = ("lm_head.weight", "embed_tokens.weight", "d2t")
_LAYER: Final = re.compile(r"(?:layers\.(\d+)|midlayer)\.")
_LATER_NORM: Final = re.compile(r"(layers\.\d+\.)(?:hidden_norm|input_layernorm)\.weight")
#: vLLM raises for weights that a class reports as not loaded (``default_loader.py:527-566``); these classes'
#: ``load_weights`` report nothing.
_KEPT: Final = (
    f"{cite('sglang', 'srt/models/llama_eagle3.py:346-378')}; "
    f"{cite('vllm', 'model_executor/models/llama_eagle3.py:418-470')}"
)
_LOADED: Final = (
    f"{cite('sglang', 'srt/model_loader/weight_utils.py (default_weight_loader)')}; "
    f"{cite('vllm', 'model_executor/model_loader/weight_utils.py (default_weight_loader)')}"
)


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """What is missing or misshapen for each engine that serves the head; alike ones are one finding."""
    if subject.head is None:
        return
    held = subject.head.tensors
    missing: dict[tuple[str, ...], list[str]] = {}
    misshapen: dict[tuple[tuple[str, Shape], ...], list[str]] = {}
    for view in seen(subject):
        if view.engine not in SERVERS:
            continue
        built = built_shapes(view, subject.head)
        names = tuple(name for name in built if name not in held and not _told(name, subject.head))
        wrong = tuple((n, shape) for n, shape in built.items() if n in held and held[n].shape != shape)
        missing.setdefault(names, []).append(view.engine)
        misshapen.setdefault(wrong, []).append(view.engine)
    for names, engines in missing.items():
        if names:
            yield _missing(names, engines)
    for wrong, engines in misshapen.items():
        if wrong:
            yield _misshapen(wrong, subject.head, engines)


def built_shapes(view: Seen, head: RawHead) -> dict[str, Shape]:
    """Canonical name and shape of every parameter that an engine builds; empty where its config lacks a size.

    Left out: ``fc``'s columns where they are whole states (`inputs` compares their number), an MLA draft's
    attention, and the matrices of a quantised head, whose names and shapes are the quantiser's.  Counts that
    the config exaggerates stop at the first one that is not stored.
    """
    config, held = view.config, head.tensors
    sizes = {name: size_of(config, name) for name in ("hidden_size", "intermediate_size", "vocab_size")}
    layers, heads = size_of(config, "num_hidden_layers"), size_of(config, "num_attention_heads")
    if None in sizes.values() or layers is None or heads is None:
        return {}
    hidden: int = sizes["hidden_size"] or 0
    states, _ = fc_inputs(view.engine, view.draft, config)
    width = size_of(config, "target_hidden_size") or hidden
    stored_layers = len({match[0] for name in held if (match := _LAYER.match(name))})
    fields: dict[str, Any] = {
        **sizes,
        "num_hidden_layers": min(layers, stored_layers + 1),
        "num_attention_heads": heads,
        "num_key_value_heads": size_of(config, "num_key_value_heads") or heads,
        "head_dim": size_of(config, "head_dim") or hidden // heads,
        "target_hidden_size": width,
        "draft_vocab_size": size_of(config, "draft_vocab_size") or sizes["vocab_size"],
        # SGLang builds these projections without bias; `tensors` says so.
        "attention_bias": view.engine == "vllm" and bool(config.get("attention_bias")),
        "mlp_bias": view.engine == "vllm" and bool(config.get("mlp_bias")),
    }
    norms = {flag: _flag(view, flag) for flag in ("norm_before_fc", "fc_norm")}
    fields |= {**norms, "norm_before_lm_head": True}
    counted = min(states, sum(name.startswith("fc_norm.") for name in held) + 1)
    shapes = head.schema.shapes(fields, counted)
    found = {name: shape for name, shape in shapes.items() if name not in _ELSEWHERE}
    if "input_norm.weight" in found:
        found["input_norm.weight"] = (states * width,)
    if view.engine == "sglang":
        later = re.compile(r"(layers\.\d+)\.input_layernorm")
        found = {later.sub(r"\1.hidden_norm", name): shape for name, shape in found.items()}
    if view.draft == "mla":
        found = {name: shape for name, shape in found.items() if ".self_attn." not in name}
    if view.draft == "qwen3":
        parts = {name.partition(".self_attn.")[0] for name in found if ".self_attn." in name}
        found |= {f"{p}.self_attn.{n}_norm.weight": (fields["head_dim"],) for p in parts for n in "qk"}
    if not _flag(view, "use_aux_hidden_state"):
        found = {name: shape for name, shape in found.items() if not name.startswith(("fc", "input_norm"))}
    elif "fc.weight" in found and "fc.weight" in held:
        found["fc.weight"] = (hidden, _columns(held["fc.weight"].shape, width, states))
    if head.fields.get("quantization_config") or config.get("quantization_config"):
        found = {name: shape for name, shape in found.items() if len(shape) == 1}
    return found


def size_of(config: Mapping[str, Any], name: str) -> int | None:
    """A size as an engine's config class takes it: a positive whole number, or None."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else None


def _columns(shape: Shape, width: int, states: int) -> int:
    whole = len(shape) == 2 and shape[1] % width == 0
    return shape[1] if whole else states * width


def _flag(view: Seen, flag: str) -> bool:
    rule = flag_rule(view.engine, view.draft, flag)
    return rule is not None and rule.value(view.config)


def _told(name: str, head: RawHead) -> bool:
    """Whether `tensors` says that it is missing: a norm without any weights, or a later layer's."""
    if name.startswith(("input_norm.", "fc_norm.")):
        return not any(stored.startswith(name.partition(".")[0]) for stored in head.tensors)
    match = _LATER_NORM.fullmatch(name)
    return match is not None and any(stored.startswith(match[1]) for stored in head.tensors)


def _missing(names: Sequence[str], engines: Sequence[str]) -> Finding:
    return Finding(
        check="tensors.missing",
        severity="wrong",
        engines=tuple(engines),
        what=f"the file lacks {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
        why="SGLang and vLLM go through the tensors that are stored and report none that are not: what is "
        "missing keeps the values that it was initialised with",
        do="restore the tensors from the training run, or correct the config that asks for them",
        source=_KEPT,
    )


def _misshapen(wrong: Sequence[tuple[str, Shape]], head: RawHead, engines: Sequence[str]) -> Finding:
    name, asked = wrong[0]
    found = list(head.tensors[name].shape)
    more = f", and {len(wrong) - 1} more tensors likewise" if len(wrong) > 1 else ""
    return Finding(
        check="tensors.shape",
        severity="wrong",
        engines=tuple(engines),
        what=f"{name} has shape {found}, and its config asks for {list(asked)}{more}",
        why="loading it fails on its shape",
        do="correct the config, or take the tensors that belong to it",
        source=_LOADED,
    )
