"""Tensors that are too many or too few for what an engine computes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from ....conventions.facts import cite, limits
from ....heads.engines import later_layers_without
from ...heads import RawHead
from ..report import Finding, Row
from ..subject import Subject
from .norms import trained_with
from .reading import tensor
from .seen import Seen, seen

_LATER: Final = re.compile(r"layers\.([1-9]\d*)\.")
#: The trainers, or readers, that norm a later layer's input with the tensor that an engine does not.
_BY_THE_OTHER: Final = {"sglang": ("vllm", "speculators"), "vllm": ("sglang",)}
_BIAS: Final = re.compile(r"(midlayer|layers\.\d+)\.(self_attn|mlp)\.\w+\.bias")


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """Norms without their flag, biases, and the norms of later draft layers."""
    if subject.head is None:
        return
    yield from _norms(subject)
    yield from _later_layers(subject.head, seen(subject))
    yield from _two_norms(subject)
    yield from _biases(subject.head)


def _norms(subject: Subject) -> Iterator[Finding]:
    """A norm's weights without the flag that turns it on, and the flag without its weights."""
    assert subject.head is not None
    tensors = subject.head.tensors
    for flag, present, what in (
        ("norm_before_fc", "input_norm.weight" in tensors, "input_norm.weight"),
        ("fc_norm", any(name.startswith("fc_norm.") for name in tensors), "fc_norm.*"),
    ):
        said = trained_with(subject, flag)
        if present and not said:
            yield Finding(
                check=f"tensors.{flag}",
                severity="wrong",
                engines=("sglang", "vllm"),
                what=f"the file has {what}, and {flag} is not set",
                why="the norm was trained and is not applied: SGLang skips its weights without a word"
                + ("; so does vLLM" if flag == "norm_before_fc" else "; vLLM refuses to load"),
                do=f"write {flag} = true at the top level",
                source=f"{cite('sglang', 'srt/models/llama_eagle3.py:173-196')}; "
                f"{cite('vllm', 'model_executor/models/llama_eagle3.py:411,464-465')}",
            )
        elif said and not present:
            yield Finding(
                check=f"tensors.{flag}",
                severity="wrong",
                what=f"{flag} is set, and the file has no {what}",
                why="the norm is applied with weights of one",
                do=f"restore {what}, or write {flag} = false",
            )


def _later_layers(head: RawHead, views: Sequence[Seen]) -> Iterator[Finding]:
    later = sorted({int(match[1]) for name in head.tensors if (match := _LATER.match(name))})
    if not later:
        return
    if any(view.engine == "sglang" and view.draft == "mla" for view in views):
        yield Finding(
            check="tensors.layers",
            severity="wrong",
            engines=("sglang",),
            what=f"the head has {len(later) + 1} draft layers, and SGLang's MLA class refuses more than one",
            why="it raises 'EAGLE3 currently only supports 1 layer'",
            do="serve it with vLLM",
            source=cite("sglang", "srt/models/kimi_k25_eagle3.py:243-244"),
        )
    for limit in limits("later_norm"):
        if without := later_layers_without(limit.name, head.tensors):
            yield Finding.of_limit(limit, layer=without[0])


def _two_norms(subject: Subject) -> Iterator[Finding]:
    """A later layer's input norm stored under both names, with other values: one engine takes each."""
    assert subject.head is not None
    head, trainer = subject.head, subject.trained.library
    for index in sorted({int(match[1]) for name in head.tensors if (match := _LATER.match(name))}):
        names = [f"layers.{index}.{norm}.weight" for norm in ("hidden_norm", "input_layernorm")]
        if not all(name in head.tensors for name in names):
            continue
        first, second = (tensor(head, name) for name in names)
        if first.shape == second.shape and torch.equal(first.float(), second.float()):
            continue
        wrong = next((engine for engine, trainers in _BY_THE_OTHER.items() if trainer in trainers), None)
        yield Finding(
            check="tensors.two_norms",
            severity="warning" if wrong is None else "wrong",
            engines=("sglang", "vllm") if wrong is None else (wrong,),
            what=f"{names[0]} and {names[1]} differ",
            why="both norm the layer's input: SGLang and TensorRT-LLM with the first, vLLM and speculators "
            "with the second, so one of them computes another head",
            do="keep the norm that the head was trained with, under both names",
            source="; ".join(limit.sources["llama"] for limit in limits("later_norm")),
        )
        return


def _biases(head: RawHead) -> Iterator[Finding]:
    if any(_BIAS.fullmatch(name) for name in head.tensors):
        yield from map(Finding.of_limit, limits("layer_bias"))
    if "fc.bias" not in head.tensors:
        return
    # SGLang's fc has one where the attention's output has.
    has_one = head.fields.get("bias") is True and "midlayer.self_attn.o_proj.bias" in head.tensors
    for limit in limits("fc_bias"):
        if not (limit.engine == "sglang" and has_one):
            yield Finding.of_limit(limit)
