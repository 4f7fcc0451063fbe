"""Embedding and output layer: shared with the target, overwritten by it, tied, or of another width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ....conventions.facts import cite, limits
from ..report import Finding, Row
from ..subject import Subject

_TIED: Final = cite("sglang", "srt/models/llama_eagle3.py:303-304")


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """``embed_tokens``, ``lm_head`` and ``tie_word_embeddings``."""
    if subject.head is None:
        return
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


def _embedding(subject: Subject) -> Iterator[Finding]:
    assert subject.head is not None
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


def _lm_head(subject: Subject) -> Iterator[Finding]:
    assert subject.head is not None
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


def _differs(subject: Subject) -> tuple[int, int] | None:
    """The head's width and the target's where they differ."""
    assert subject.head is not None
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
