"""Our own layout: any head, with a capture section, its target's fingerprint, and a witness."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...capture import find_anatomy
from ...capture.anatomy import Anatomy
from ...conventions import Conventions
from ...errors import HeadError
from ...heads.checkpoint import SaveReport, SettledHead, restore, write_head
from ...heads.witness import make_witness
from .draft import CONVERSION, Draft, no_norm
from .keys import beyond_ours

_EMBEDDING: Final = "embed_tokens.weight"


def cannot_say(draft: Draft) -> list[str]:
    """What our head does not compute, a sentence each."""
    losses = [draft.no_place(name) for name in draft.unknown_tensors]
    if not draft.computes["norm_before_lm_head"]:
        losses.append(no_norm("capture-hooks"))
    if (window := draft.window) is not None:
        losses.append(f"its draft attends to everything, and this one to the last {window} tokens")
    return [*losses, *beyond_ours(draft)]


def without_targets_embedding(draft: Draft, anatomy: Anatomy) -> Draft:
    """The head without a copy of its target's embedding, which speculators puts into every head.

    SGLang replaces an embedding by the target's, so that a head with one of its own is no head for SGLang.
    """
    own, table = draft.tensors.get(_EMBEDDING), next(anatomy.embedding.parameters())
    if own is None or own.shape != table.shape:
        return draft
    if not torch.equal(own.to(table.device, table.dtype), table):
        return draft
    tensors = {name: tensor for name, tensor in draft.tensors.items() if name != _EMBEDDING}
    left_out = {**draft.left_out, _EMBEDDING: "the target's own, and every engine takes it from there"}
    return dataclasses.replace(draft, tensors=tensors, left_out=left_out)


def settled(draft: Draft, settings: Mapping[str, Any] | None = None) -> SettledHead:
    """The head as a provider restores it, its inputs in the draft's order.

    Args:
        draft: the head.
        settings: of its objective, where it has none of its own.

    Raises:
        HeadError: its numbers are float8.
    """
    small = next(
        (n for n, t in draft.tensors.items() if t.is_floating_point() and t.element_size() < 2), None
    )
    if small is not None:
        raise HeadError(
            f"{small} is {str(draft.tensors[small].dtype).removeprefix('torch.')}, in which nothing can be "
            "computed; dequantise the head with the library that quantised it"
        )
    own = dict(draft.carried.get("capture-hooks", {}))
    if settings:
        own[draft.schema.settings_key] = dict(settings)
    return SettledHead(
        draft.kind,
        {**_named(draft), "d2t": _offsets(draft)},
        {**draft.fields, **draft.flags, **own},
        draft.spec,
        tuple(range(len(draft.points))),
    )


def write_ours(
    draft: Draft,
    model: nn.Module,
    tokens: Sequence[Sequence[int]] | None,
    directory: Path,
    record: Mapping[str, Any],
    overwrite: bool,
    conventions: Conventions,
) -> SaveReport:
    """Write a head for SGLang, vLLM and the embedded engine; its tensors keep their bits.

    Args:
        draft: with its inputs in ascending depth.
        model: the target.
        tokens: token ids of conversations for the witness; None for a fixed random choice.
        directory: where to.
        record: what the file says of its making.
        overwrite: replace a head that is there.
        conventions: what layer ids mean to each engine.

    Raises:
        HeadError: as `settled`, or as `save_head`.
    """
    anatomy = find_anatomy(model)
    head = settled(draft)
    _, fields = restore(head, anatomy).export(head.order)
    witness = make_witness(model, draft.spec, tokens or _some_tokens(anatomy.vocab_size))
    extras = {key: value for key, value in draft.extras.items() if key not in fields}
    return write_head(
        directory,
        kind=draft.kind,
        spec=draft.spec,
        order=head.order,
        tensors=_named(draft),
        fields={**fields, **extras, CONVERSION: {**draft.conversion("capture-hooks"), **record}},
        draft_size=draft.fields["draft_vocab_size"],
        anatomy=anatomy,
        witness=witness,
        overwrite=overwrite,
        conventions=conventions,
    )


def _named(draft: Draft) -> dict[str, Tensor]:
    """The tensors in our names."""
    return draft.without(draft.unknown_tensors).named("midlayer", masks=True, both_norms=True)


def _offsets(draft: Draft) -> Tensor:
    """``d2t``, also of a head that drafts the whole vocabulary."""
    found = draft.tensors.get("d2t")
    return torch.zeros(draft.fields["draft_vocab_size"], dtype=torch.int64) if found is None else found


def _some_tokens(vocabulary: int) -> list[list[int]]:
    """Four sequences of tokens that depend on nothing but the vocabulary's size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (4, 13), generator=generator).tolist()
