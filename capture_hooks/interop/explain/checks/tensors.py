"""Tensors: shared with the target, unknown to an engine, missing, misshapen, or used otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from ....conventions.facts import SERVERS, Draft, cite, fc_inputs, flag_rule, limits
from ....heads.engines import later_layers_without
from ...heads import RawHead
from ..report import Finding
from ..subject import HeadSubject
from .config import trained_with
from .seen import EngineView, seen, size_of, tensor

_TIED: Final = cite("sglang", "srt/models/llama_eagle3.py:303-304")


def check_weights(subject: HeadSubject) -> Iterator[Finding]:
    """``embed_tokens``, ``lm_head`` and ``tie_word_embeddings``."""
    yield from _embedding(subject)
    yield from _lm_head(subject)
    if subject.head.fields.get("tie_word_embeddings") is True:
        yield Finding(
            check="weights.tied",
            severity="wrong",
            engines=("sglang",),
            what="tie_word_embeddings is true",
            why="SGLang then takes the embedding, which is the target's, for the draft's lm_head; vLLM does "
            "not look at it",
            do="write tie_word_embeddings = false",
            source=_TIED,
        )


def _embedding(subject: HeadSubject) -> Iterator[Finding]:
    own, wide = subject.head.tensors.get("embed_tokens.weight"), _differs(subject)
    if own is None and wide:
        hidden, target = wide
        yield Finding(
            check="weights.embedding",
            severity="wrong",
            engines=("sglang", "vllm"),
            what=f"the head is {hidden} wide and the target {target}, and it has no embedding of its own",
            why="the target's cannot be shared, and the draft's stays as it was initialised",
            do="save the head with the embedding it was trained with",
            source=cite("sglang", "srt/models/llama.py:910-917"),
        )
    if own is not None and not wide:
        yield from map(Finding.of_limit, limits("embedding"))
    rows_, hidden_size = (subject.head.fields.get(name) for name in ("vocab_size", "hidden_size"))
    sizes = type(rows_) is int and type(hidden_size) is int
    if own is not None and sizes and own.shape != (rows_, hidden_size):
        yield _width(
            "embed_tokens.weight", own.shape, f"vocab_size and hidden_size ask for [{rows_}, {hidden_size}]"
        )


def _lm_head(subject: HeadSubject) -> Iterator[Finding]:
    fields, own = subject.head.fields, subject.head.tensors.get("lm_head.weight")
    draft, vocab = fields.get("draft_vocab_size"), fields.get("vocab_size")
    if own is None:
        yield from _shared(draft, vocab)
        return
    if draft is None and "draft_vocab_size" in subject.config:
        yield Finding(
            check="weights.lm_head",
            severity="wrong",
            engines=("sglang",),
            what="the head has an lm_head of its own, and draft_vocab_size is null",
            why="SGLang takes null for the wish to share, and puts the target's output layer in its place",
            do=f"write draft_vocab_size = {own.shape[0] if own.shape else vocab}",
            source=cite("sglang", "srt/speculative/eagle_worker_v2.py:355-361"),
        )
    rows_ = draft if type(draft) is int else vocab
    hidden = fields.get("hidden_size")
    if type(rows_) is int and type(hidden) is int and own.shape != (rows_, hidden):
        yield _width(
            "lm_head.weight", own.shape, f"draft_vocab_size and hidden_size ask for [{rows_}, {hidden}]"
        )


def _shared(draft: object, vocab: object) -> Iterator[Finding]:
    """No ``lm_head`` in the file: the target's, which has a row for each of its tokens, may be shared."""
    if draft is None:
        yield Finding(
            check="weights.lm_head",
            severity="note",
            engines=("sglang", "vllm"),
            what="no lm_head and no draft_vocab_size: the target's output layer is shared",
            why="that is what SGLang and vLLM do then; the head must have been trained with it",
            do="",
            source=cite("sglang", "srt/models/llama_eagle3.py:306-308"),
        )
        return
    yield Finding(
        check="weights.lm_head",
        severity="wrong",
        engines=("sglang",) if draft == vocab else ("sglang", "vllm"),
        what=f"no lm_head.weight, and draft_vocab_size is {draft}",
        why="SGLang shares the target's only where draft_vocab_size is null, and keeps an output layer that "
        "was never loaded; vLLM shares the target's, whose rows are the target's tokens and not the draft's",
        do="save the head with its lm_head, or write draft_vocab_size = null where it equals vocab_size",
        source=f"{cite('sglang', 'srt/models/llama_eagle3.py:303-316')}; "
        f"{cite('vllm', 'v1/spec_decode/llm_base_proposer.py:1508-1556')}",
    )


def _differs(subject: HeadSubject) -> tuple[int, int] | None:
    """The head's width and the target's where they differ."""
    hidden = subject.head.fields.get("hidden_size")
    target = subject.config.get("target_hidden_size") or subject.facts.target.hidden_size
    if type(hidden) is int and type(target) is int and hidden != target:
        return hidden, target
    return None


def _width(name: str, shape: tuple[int, ...], why: str) -> Finding:
    return Finding(
        check="weights.width",
        severity="wrong",
        what=f"{name} has shape {list(shape)}, and {why}",
        why="loading it fails on its shape",
        do="correct the config, or take the tensor that belongs to it",
    )


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


def check_names(subject: HeadSubject) -> Iterator[Finding]:
    """Names that no class has, that this one builds no parameter for, or that stand in another spelling."""
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


def _beyond(view: EngineView, head: RawHead) -> list[str]:
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


def _other_spelling(view: EngineView, head: RawHead) -> list[str]:
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


def _unknown(view: EngineView, strange: Sequence[str]) -> Finding:
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


def _unbuilt(view: EngineView, names: Sequence[str]) -> Finding:
    return Finding(
        check="tensors.unbuilt",
        severity="wrong",
        engines=(view.engine,),
        what=f"{len(names)} tensor(s) of layers or inputs that the config does not count: {_some(names)}",
        why=_fate(view),
        do="write num_hidden_layers and num_aux_hidden_states as they were trained",
        source=_source(view),
    )


def _spelling(view: EngineView, names: Sequence[str]) -> Finding:
    return Finding(
        check="tensors.spelling",
        severity="wrong",
        engines=(view.engine,),
        what=f"{len(names)} tensor(s) under names that {view.engine} does not look for: {_some(names)}",
        why=_fate(view),
        do="rename them (capture-hooks convert writes the names of a layout)",
        source=_source(view),
    )


def _fate(view: EngineView) -> str:
    if view.engine == "vllm":
        return "it builds no such parameter and refuses to load (ValueError: There is no module or parameter)"
    return "it finds no such parameter and skips them; what they were trained for is not computed"


def _source(view: EngineView) -> str:
    if view.engine == "vllm":
        return f"{cite('vllm', _VLLM[view.draft])}; {cite('vllm', 'model_executor/models/utils.py:438-448')}"
    return cite("sglang", _SGLANG[view.draft])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


Shape = tuple[int, ...]
#: Their absence has other meanings and checks of its own (`check_weights`, `check_vocabulary`).
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


def check_complete(subject: HeadSubject) -> Iterator[Finding]:
    """What is missing or misshapen for each engine that serves the head; alike ones are one finding."""
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


def built_shapes(view: EngineView, head: RawHead) -> dict[str, Shape]:
    """Canonical name and shape of every parameter that an engine builds; empty where its config lacks a size.

    Left out: ``fc``'s columns where they are whole states (`check_inputs` compares their number), an MLA
    draft's attention, and the matrices of a quantised head, whose names and shapes are the quantiser's.
    Counts that the config exaggerates stop at the first one that is not stored.
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
        # SGLang builds these projections without bias; `check_tensors` says so.
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


def _columns(shape: Shape, width: int, states: int) -> int:
    whole = len(shape) == 2 and shape[1] % width == 0
    return shape[1] if whole else states * width


def _flag(view: EngineView, flag: str) -> bool:
    rule = flag_rule(view.engine, view.draft, flag)
    return rule is not None and rule.value(view.config)


def _told(name: str, head: RawHead) -> bool:
    """Whether `check_tensors` says that it is missing: a norm without any weights, or a later layer's."""
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


_LATER: Final = re.compile(r"layers\.([1-9]\d*)\.")
#: The trainers, or readers, that norm a later layer's input with the tensor that an engine does not.
_BY_THE_OTHER: Final = {"sglang": ("vllm", "speculators"), "vllm": ("sglang",)}
_BIAS: Final = re.compile(r"(midlayer|layers\.\d+)\.(self_attn|mlp)\.\w+\.bias")


def check_tensors(subject: HeadSubject) -> Iterator[Finding]:
    """Norms without their flag, biases, and the norms of later draft layers."""
    yield from _norms(subject)
    yield from _later_layers(subject.head, seen(subject))
    yield from _two_norms(subject)
    yield from _biases(subject.head)


def _norms(subject: HeadSubject) -> Iterator[Finding]:
    """A norm's weights without the flag that turns it on, and the flag without its weights."""
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


def _later_layers(head: RawHead, views: Sequence[EngineView]) -> Iterator[Finding]:
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


def _two_norms(subject: HeadSubject) -> Iterator[Finding]:
    """A later layer's input norm stored under both names, with other values: one engine takes each."""
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
