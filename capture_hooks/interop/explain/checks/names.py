"""Names in the file: which an engine's loader refuses, and which it passes over without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from ....conventions.facts import SERVERS, Draft, cite, fc_inputs
from ...heads import RawHead
from ..report import Finding, Row
from ..subject import Subject
from .complete import size_of
from .seen import Seen, seen

_ATTENTION: Final = {"llama": "[qkvo]_proj", "qwen3": "[qkvo]_proj|[qk]_norm", "mla": r"\w+"}
#: vLLM drops these from every file (``REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER``); no engine needs them.
_COMPUTED: Final = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_INDEX: Final = re.compile(r"(layers|fc_norm)\.(\d+)\.")
_VLLM: Final = {
    "llama": "model_executor/models/llama_eagle3.py:418-470",
    "qwen3": "model_executor/models/qwen3_eagle3.py (load_weights)",
    "mla": "model_executor/models/deepseek_eagle3.py:370-401",
}
_SGLANG: Final = {
    "llama": "srt/models/llama_eagle3.py:346-378",
    "qwen3": "srt/models/llama_eagle3.py:346-378",
    "mla": "srt/models/kimi_k25_eagle3.py (load_weights)",
}


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """Names that no class has, that this one builds no parameter for, or that stand in another spelling."""
    if subject.head is None:
        return
    for view in seen(subject):
        if view.engine not in SERVERS:
            continue
        strange = sorted(name for name in subject.head.tensors if not _known(view.draft).fullmatch(name))
        if strange:
            yield _unknown(view, strange)
        if beyond := _beyond(view, subject.head):
            yield _unbuilt(view, beyond)
        if spelt := _other_spelling(view, subject.head):
            yield _spelling(view, spelt)


def _known(draft: Draft) -> re.Pattern[str]:
    """Everything that a draft class has a place for, by canonical name."""
    return re.compile(
        rf"(midlayer|layers\.\d+)\.(self_attn\.({_ATTENTION[draft]})|mlp\.(gate|up|down)_proj"
        r"|hidden_norm|input_layernorm|post_attention_layernorm)"
        r"\.(weight|bias|\w*scale\w*|weight_\w+|qweight|qzeros|g_idx)"
        r"|(fc|fc_norm\.\d+|input_norm|norm|lm_head|embed_tokens)\.(weight|bias|\w*scale\w*)"
        rf"|d2t|t2d|mask_hidden|{_COMPUTED.pattern}"
    )


def _beyond(view: Seen, head: RawHead) -> list[str]:
    """Tensors of layers, and of states' norms, whose index is past the number that the config gives."""
    limits = {"layers": size_of(view.config, "num_hidden_layers")}
    limits["fc_norm"] = fc_inputs(view.engine, view.draft, view.config)[0]
    found = []
    for name in sorted(head.tensors):
        match = _INDEX.match(name)
        limit = limits[match[1]] if match else None
        if match and limit is not None and int(match[2][:9]) >= limit:
            found.append(name)
    return found


def _other_spelling(view: Seen, head: RawHead) -> list[str]:
    """Stored names that are not those that the engine looks for, though they mean a tensor that it has."""
    found = []
    for canonical, stored in sorted(head.names.items()):
        name = stored.name
        prefixed = name.startswith("model.")
        legacy = canonical.startswith("fc_norm.") and "aux_norm" in name
        if canonical == "t2d" or _COMPUTED.fullmatch(name):
            continue
        if view.engine == "sglang" and view.draft != "mla":
            # It tries each name with and without `model.`, and knows the legacy ones.
            if prefixed and canonical.startswith("lm_head."):
                found.append(name)
        elif (prefixed or legacy) and not (view.engine == "sglang" and canonical == "d2t"):
            found.append(name)
    return found


def _unknown(view: Seen, strange: Sequence[str]) -> Finding:
    refused = view.engine == "vllm"
    return Finding(
        check="tensors.unknown",
        severity="wrong" if refused else "warning",
        engines=(view.engine,),
        what=f"{len(strange)} tensor(s) that {view.engine}'s draft class does not have: {_some(strange)}",
        why="it refuses to load them (ValueError: There is no module or parameter named ...)"
        if refused
        else "it skips them without a word (its MLA class with a warning), so whatever they do in training "
        "is not done",
        do="find out what they are; remove them only if the head does without",
        source=_source(view),
    )


def _unbuilt(view: Seen, names: Sequence[str]) -> Finding:
    return Finding(
        check="tensors.unbuilt",
        severity="wrong",
        engines=(view.engine,),
        what=f"{len(names)} tensor(s) of layers or inputs that the config does not count: {_some(names)}",
        why=_fate(view),
        do="write num_hidden_layers and num_aux_hidden_states as they were trained",
        source=_source(view),
    )


def _spelling(view: Seen, names: Sequence[str]) -> Finding:
    return Finding(
        check="tensors.spelling",
        severity="wrong",
        engines=(view.engine,),
        what=f"{len(names)} tensor(s) under names that {view.engine} does not look for: {_some(names)}",
        why=_fate(view),
        do="rename them (capture-hooks convert writes the names of a layout)",
        source=_source(view),
    )


def _fate(view: Seen) -> str:
    if view.engine == "vllm":
        return "it builds no such parameter and refuses to load (ValueError: There is no module or parameter)"
    return "it finds no such parameter and skips them; what they were trained for is not computed"


def _source(view: Seen) -> str:
    if view.engine == "vllm":
        return f"{cite('vllm', _VLLM[view.draft])}; {cite('vllm', 'model_executor/models/utils.py:438-448')}"
    return cite("sglang", _SGLANG[view.draft])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
