"""The draft vocabulary: which form its map has, and whether it is there and right at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ....conventions.facts import cite
from ....errors import HeadError
from ....heads.vocabulary import read_vocabulary
from ...heads import RawHead
from ..report import Finding
from ..subject import HeadSubject
from .seen import tensor

_READ_BY: Final = (
    f"{cite('sglang', 'srt/models/llama_eagle3.py:350-353')}; "
    f"{cite('vllm', 'model_executor/models/llama_eagle3.py:340,385-386')}"
)
_BOTH: Final = ("sglang", "vllm")
#: Stands for an unknown vocabulary size: any id fits.
_UNBOUNDED: Final = 2**62


def check_vocabulary(subject: HeadSubject) -> Iterator[Finding]:
    """``d2t`` against the sizes, ``t2d`` against ``d2t``; their values are read, no other tensor's."""
    head = subject.head
    draft, target = _size(head, "draft_vocab_size"), _vocabulary(subject)
    d2t = tensor(head, "d2t") if "d2t" in head.tensors else None
    if d2t is None:
        yield from _missing(draft, target)
        return
    if d2t.is_floating_point() or d2t.dtype == torch.bool or d2t.dim() != 1 or not len(d2t):
        yield _wrong(f"d2t is {list(d2t.shape)} {_dtype(d2t)}", "it holds one integer for each draft token")
        return
    if draft is not None and len(d2t) != draft:
        yield _wrong(
            f"d2t has {len(d2t)} entries, and draft_vocab_size is {draft}", "each draft token needs one"
        )
        return
    if target is not None and len(d2t) == target:
        yield Finding(
            check="vocabulary.superfluous",
            severity="wrong",
            engines=("vllm",),
            what="a d2t where the head drafts the whole vocabulary",
            why="vLLM makes no parameter for it then, and its loader refuses the tensor",
            do="remove d2t and t2d",
            source=cite("vllm", "model_executor/models/llama_eagle3.py:338-345"),
        )
    mask = tensor(head, "t2d") if "t2d" in head.tensors else None
    yield from _read(d2t, mask, target)


def _read(d2t: Tensor, t2d: Tensor | None, target: int | None) -> Iterator[Finding]:
    """The map as `convert` reads it, whose word on its form is the word here."""
    tensors = {"d2t": d2t} if t2d is None else {"d2t": d2t, "t2d": t2d}
    size = target or (len(t2d) if t2d is not None and t2d.dim() == 1 else _UNBOUNDED)
    try:
        found = read_vocabulary(tensors, len(d2t), size, "the head")
    except HeadError:
        if t2d is None:
            yield _wrong(
                "d2t is neither ascending offsets nor ascending token ids",
                "read as offsets it names ids out of range or twice",
            )
            return
        yield from _read(d2t, None, target)
        yield _against(d2t, t2d, target)
        return
    if found.form == "lost":
        yield _zeros(len(d2t), t2d)
    elif found.form == "absolute":
        yield Finding(
            check="vocabulary.absolute",
            severity="wrong",
            engines=_BOTH,
            what="d2t holds absolute token ids" + ("" if t2d is None else ", those that t2d marks"),
            why="SGLang and vLLM read offsets: target id = i + d2t[i]. Read so, ids leave the vocabulary or "
            "name other tokens, and nothing fails",
            do="subtract arange(len(d2t)) from it",
            source=_READ_BY,
        )
    elif found.doubt is not None:
        yield Finding(
            check="vocabulary.form",
            severity="warning",
            what="d2t is read as offsets; its values would also be ascending token ids, and no t2d decides",
            why="offsets repeat wherever two neighbouring tokens are both kept, and these never do",
            do="if its writer keeps absolute ids (llama.cpp does), subtract arange(len(d2t))",
        )


def _zeros(draft: int, t2d: Tensor | None) -> Finding:
    """A map that was never written: certain where ``t2d`` marks other tokens than the first."""
    if t2d is not None:
        return Finding(
            check="vocabulary.lost",
            severity="wrong",
            engines=_BOTH,
            what=f"d2t is all zeros, and t2d does not mark the first {draft} tokens",
            why="the map was never written; both engines take draft token i for target token i",
            do="build it from t2d: d2t = t2d.nonzero().flatten() - arange(len(d2t))",
            source=_READ_BY,
        )
    return Finding(
        check="vocabulary.identity",
        severity="warning",
        engines=_BOTH,
        what=f"d2t is all zeros: draft token i stands for target token i, the first {draft}",
        why="a map that was lost or never built looks the same; with it the head drafts other tokens "
        "than it was trained on",
        do="compare with the map of the training run",
        source=_READ_BY,
    )


def _against(d2t: Tensor, t2d: Tensor, target: int | None) -> Finding:
    if t2d.dim() != 1 or (target is not None and len(t2d) != target):
        return _mask(f"t2d is {list(t2d.shape)}, and the target has {target} tokens")
    return _mask(
        f"t2d marks {int(t2d.count_nonzero())} tokens, and they are not the {len(d2t)} that d2t names"
    )


def _missing(draft: int | None, target: int | None) -> Iterator[Finding]:
    if draft is None or target is None or draft == target:
        return
    yield Finding(
        check="vocabulary.lost",
        severity="wrong",
        engines=_BOTH,
        what=f"no d2t, and draft_vocab_size {draft} differs from vocab_size {target}",
        why="both engines then take draft token i for target token i, without a word",
        do="add the d2t of the training run",
        source=_READ_BY,
    )


def _mask(what: str) -> Finding:
    return Finding(
        check="vocabulary.t2d",
        severity="warning",
        what=what,
        why="servers skip t2d; trainers choose by it what the head can learn, so one of the two is not its "
        "own",
        do="compare with the map of the training run",
    )


def _wrong(what: str, why: str) -> Finding:
    return Finding(
        check="vocabulary.d2t",
        severity="wrong",
        engines=_BOTH,
        what=what,
        why=why,
        do="restore the d2t of the training run",
        source=_READ_BY,
    )


def _vocabulary(subject: HeadSubject) -> int | None:
    return subject.facts.target.vocab_size or _size(subject.head, "vocab_size")


def _size(head: RawHead, name: str) -> int | None:
    value = head.fields.get(name)
    return value if type(value) is int and value > 0 else None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
