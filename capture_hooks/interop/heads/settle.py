"""From a head as its file has it to the neutral form: every open question answered, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ...conventions import BUILTIN, Conventions
from ...errors import HeadError
from ...heads.consistency import check_section
from ...heads.files import WEIGHTS, check_digest
from ...spec import CaptureSpec
from . import keys
from .contract import RawHead
from .draft import CONVERSION, Draft, Target
from .fields import fields_of
from .inputs import inputs_of
from .maps import read_vocabulary
from .norms import computes_of, modelopt_norm, one_norm
from .open import NESTED
from .shapes import check_tensors

#: Architectures of the Llama-type EAGLE-3 draft, by layout.
_ARCHITECTURES: Final = {
    "capture-hooks": ("LlamaForCausalLMEagle3",),
    "eagle": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    "modelopt": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    "speculators": ("Eagle3DraftModel", "Eagle3Speculator"),
}


def settle(
    raw: RawHead,
    target: Target | None,
    written_for: str | None = None,
    spec: CaptureSpec | None = None,
    unverified: bool = False,
    conventions: Conventions = BUILTIN,
) -> Draft:
    """The neutral form of a head.

    Args:
        raw: the head.
        target: its target; None only for a head that carries a fingerprint of it.
        written_for: see `inputs.inputs_of`, as for the next two.
        spec: the inputs, where the user knows them.
        unverified: take a convention that was only read.
        conventions: what layer ids may mean.

    Raises:
        HeadError: the head is of another kind, contradicts itself or its target, or leaves something open.
        ConventionError: see `inputs.inputs_of`.
    """
    where = str(raw.directory)
    _check_kind(raw, where)
    if raw.section is not None:
        check_section(raw.config, raw.section, where, conventions=conventions)
        check_digest(raw.directory / WEIGHTS, raw.section.weights_sha256)
    if target is None:
        if raw.section is None:
            raise HeadError(f"{where} does not say what its target is; name it (--target)")
        target = Target.of_fingerprint(raw.section.target)
    spec, contradictions, notes = inputs_of(raw, target, written_for, spec, unverified, conventions)
    fields = fields_of(raw, target, where)
    tensors = raw.read()
    vocabulary = read_vocabulary(tensors, fields["draft_vocab_size"], target.vocab_size, where)
    losses = [*_inherited(raw), *contradictions]
    if vocabulary.form == "lost":
        losses.append("d2t holds zeros alone: the draft vocabulary was never written, or is the first tokens")
    elif vocabulary.form == "absolute":
        notes += ("d2t held absolute ids; written as offsets",)
    notes += (vocabulary.doubt,) if vocabulary.doubt else ()
    computes = computes_of(raw, tensors, written_for, where)
    left_out = {key: why for key, why in keys.IRRELEVANT.items() if key in raw.config}
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in ("d2t", "t2d"):
            continue
        reason = next((why for end, why in keys.IRRELEVANT_TENSORS.items() if name.endswith(end)), None)
        if reason is None:
            kept[name] = tensor
        else:
            left_out[name] = reason
    if vocabulary.form != "identity":
        kept["d2t"] = vocabulary.ids - torch.arange(len(vocabulary.ids))
    if raw.config.get("tie_word_embeddings") is True:
        notes += ("tie_word_embeddings was true: SGLang took the embedding for lm_head; now it is false",)
    notes += one_norm(kept, fields["num_hidden_layers"], where)
    check_tensors(kept, fields, computes, len(spec), where)
    own = (key for names in keys.OWN.values() for key in names)
    known = {*keys.MAPPED, *keys.IRRELEVANT, *own, *raw.ids}
    everything = {**raw.config, **(raw.config.get(NESTED) or {})}
    eagle = raw.config.get("eagle_config") or {}
    return Draft(
        spec,
        target,
        computes,
        fields,
        {key: value for key, value in everything.items() if key not in known},
        {key: value for key, value in eagle.items() if key not in keys.EAGLE_MAPPED},
        _carried(raw, eagle),
        kept,
        tuple(losses),
        (*notes, *modelopt_norm(raw, written_for, kept)),
        left_out,
    )


def _check_kind(raw: RawHead, where: str) -> None:
    if raw.problems:
        raise HeadError(f"{where}: its config contradicts itself: {'; '.join(raw.problems)}")
    architectures = raw.config.get("architectures")
    known = _ARCHITECTURES[raw.layout]
    if not isinstance(architectures, list) or not any(name in known for name in architectures):
        raise HeadError(
            f"{where}: architectures is {architectures!r}; of layout {raw.layout} "
            f"{' or '.join(known)} can be converted: a Llama-type EAGLE-3 draft"
        )
    kind = raw.config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise HeadError(f"{where}: speculators_model_type is {kind!r}; only eagle3 can be converted")
    if raw.flags.use_aux_hidden_state is False:
        raise HeadError(
            f"{where}: use_aux_hidden_state is false: it eats the target's final state alone, without fc; "
            "only heads that eat captured states through fc can be converted"
        )
    eagle = raw.config.get("eagle_config") or {}
    for name, fine in keys.MODELOPT.items():
        if fine is not None and eagle.get(name) not in fine:
            raise HeadError(
                f"{where}: eagle_config.{name} is {eagle[name]!r}: no reader computes a head like that"
            )


def _inherited(raw: RawHead) -> list[str]:
    before = raw.config.get(CONVERSION)
    losses = before.get("losses", []) if isinstance(before, dict) else []
    return [str(loss) for loss in losses] if isinstance(losses, list) else []


def _carried(raw: RawHead, eagle: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Keys of one layout alone: found here, or kept by an earlier conversion."""
    before = raw.config.get(CONVERSION)
    kept = before.get("carried", {}) if isinstance(before, dict) else {}
    found = {k: dict(v) for k, v in kept.items() if isinstance(v, dict)} if isinstance(kept, dict) else {}
    for layout, names in keys.OWN.items():
        if own := {name: raw.config[name] for name in names if name in raw.config}:
            found[layout] = own
    if own := {name: eagle[name] for name in keys.MODELOPT if name in eagle}:
        found["modelopt"] = own
    return found
