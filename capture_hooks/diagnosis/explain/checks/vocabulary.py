"""The draft vocabulary: which form its map has, and whether it is there and right at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from ....heads.formats import RawHead
from ..behaviour import cite
from ..report import Finding, Row
from ..subject import Subject
from .reading import tensor

_READ_BY: Final = (
    f"{cite('sglang', 'srt/models/llama_eagle3.py:350-353')}; "
    f"{cite('vllm', 'model_executor/models/llama_eagle3.py:340,385-386')}"
)
_BOTH: Final = ("sglang", "vllm")


def check(subject: Subject, rows: Sequence[Row]) -> Iterator[Finding]:
    """``d2t`` against the sizes, ``t2d`` against ``d2t``; their values are read, no other tensor's."""
    if subject.head is None:
        return
    head = subject.head
    draft, target = _size(head, "draft_vocab_size"), _vocabulary(subject)
    d2t = tensor(head, "d2t") if "d2t" in head.tensors else None
    if d2t is None:
        yield from _missing(draft, target)
        return
    if d2t.is_floating_point() or d2t.dtype == torch.bool or d2t.dim() != 1:
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
    offsets = d2t.to(torch.int64)
    yield from _form(offsets, target)
    if "t2d" in head.tensors:
        yield from _against_t2d(offsets, tensor(head, "t2d"), target)


def form_of(d2t: Tensor, target: int | None) -> str:
    """``"identity"``, ``"offset"`` or ``"absolute"``, from the values [D] int64 alone; ``"neither"`` else.

    Offsets of ascending ids never fall, and repeat wherever two neighbours are both kept; absolute ids rise
    strictly.  A list that could be both is taken for offsets, which every server reads, if they fit.
    """
    if not d2t.any():
        return "identity"
    ids = d2t + torch.arange(len(d2t))
    if _ascends(ids) and int(ids[0]) >= 0 and (target is None or int(ids[-1]) < target):
        return "offset"
    if _ascends(d2t) and int(d2t[0]) >= 0 and (target is None or int(d2t[-1]) < target):
        return "absolute"
    return "neither"


def _form(d2t: Tensor, target: int | None) -> Iterator[Finding]:
    form = form_of(d2t, target)
    if form == "identity" and (target is None or len(d2t) < target):
        yield Finding(
            check="vocabulary.identity",
            severity="warning",
            engines=_BOTH,
            what=f"d2t is all zeros: draft token i stands for target token i, the first {len(d2t)}",
            why="a map that was lost or never built looks the same; with it the head drafts other tokens "
            "than it was trained on",
            do="compare with the map of the training run",
            source=_READ_BY,
        )
    elif form == "absolute":
        yield Finding(
            check="vocabulary.absolute",
            severity="wrong",
            engines=_BOTH,
            what="d2t holds absolute token ids",
            why="SGLang and vLLM read offsets: target id = i + d2t[i]. Read so, ids leave the vocabulary or "
            "name other tokens, and nothing fails",
            do="subtract arange(len(d2t)) from it",
            source=_READ_BY,
        )
    elif form == "neither":
        yield _wrong(
            "d2t is neither ascending offsets nor ascending token ids",
            "read as offsets it names ids out of range or twice",
        )
    elif form == "offset" and target is not None and _ascends(d2t):
        yield Finding(
            check="vocabulary.form",
            severity="note",
            what="d2t is read as offsets; its values would also be ascending token ids",
            why="offsets repeat wherever two neighbouring tokens are both kept, and these never do",
            do="if its writer keeps absolute ids (llama.cpp does), subtract arange(len(d2t))",
        )


def _against_t2d(d2t: Tensor, t2d: Tensor, target: int | None) -> Iterator[Finding]:
    if t2d.dim() != 1 or (target is not None and len(t2d) != target):
        yield _mask(f"t2d is {list(t2d.shape)}, and the target has {target} tokens")
        return
    marked = t2d.nonzero().flatten()
    ids = (d2t + torch.arange(len(d2t))).sort().values
    if not torch.equal(marked, ids):
        yield _mask(f"t2d marks {len(marked)} tokens, and they are not the {len(ids)} that d2t names")


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


def _ascends(values: Tensor) -> bool:
    return len(values) < 2 or bool((values.diff() > 0).all())


def _vocabulary(subject: Subject) -> int | None:
    assert subject.head is not None
    return subject.facts.target.vocab_size or _size(subject.head, "vocab_size")


def _size(head: RawHead, name: str) -> int | None:
    value = head.fields.get(name)
    return value if type(value) is int and value > 0 else None


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
