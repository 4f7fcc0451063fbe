"""From a head as its file has it to the neutral form: every open question answered, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ...conventions import BUILTIN, Conventions
from ...conventions.lookup import in_force
from ...errors import HeadError
from ...heads.consistency import check_section
from ...heads.files import WEIGHTS, check_digest
from ...heads.vocabulary import read_vocabulary
from ...spec import CaptureSpec
from . import keys
from .draft import CONVERSION, Draft, TargetShape
from .inputs import inputs_of
from .modelopt import twice
from .open import NESTED, RawHead

#: Architectures of the Llama-type EAGLE-3 draft in other libraries' layouts.
_ARCHITECTURES: Final = {
    "eagle": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    "modelopt": ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),
    "speculators": ("Eagle3DraftModel", "Eagle3Speculator"),
}


def settle(
    raw: RawHead,
    target: TargetShape | None,
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
        target = TargetShape.of_fingerprint(raw.section.target)
    spec, contradictions, notes = inputs_of(raw, target, written_for, spec, unverified, conventions)
    fields = _fields(raw, target, where)
    tensors = raw.read()
    vocabulary = read_vocabulary(tensors, fields["draft_vocab_size"], target.vocab_size, where)
    losses = [*_inherited(raw), *contradictions]
    if vocabulary.form == "lost":
        losses.append("d2t holds zeros alone: the draft vocabulary was never written, or is the first tokens")
    elif vocabulary.form == "absolute":
        notes += ("d2t held absolute ids; written as offsets",)
    notes += (vocabulary.doubt,) if vocabulary.doubt else ()
    # A convention's name says whose it is; a library's is its own.
    named = {convention.name: convention.library for convention in in_force(conventions)}
    writer = None if written_for is None else named.get(written_for, written_for)
    computes = _computes(raw, tensors, writer, where)
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
    notes += _one_norm(raw.schema.later_norms, kept, fields["num_hidden_layers"], where)
    shapes = {name: tuple(tensor.shape) for name, tensor in kept.items()}
    raw.schema.check_shapes(shapes, {**fields, **computes}, len(spec), where)
    own = (key for names in keys.owned(raw.schema).values() for key in names)
    known = {*keys.mapped(raw.schema), *keys.IRRELEVANT, *own, *raw.ids}
    everything = {**raw.config, **(raw.config.get(NESTED) or {})}
    eagle = raw.config.get("eagle_config") or {}
    normed_twice = "modelopt" in (raw.layout, writer)
    if normed_twice:
        notes += tuple(
            f"{why}. Every server computes hidden_norm(h), as this file keeps it" for why in twice(kept)
        )
    eagle_known = keys.eagle_mapped(raw.schema)
    return Draft(
        raw.kind,
        raw.schema,
        spec,
        target,
        computes,
        fields,
        {key: value for key, value in everything.items() if key not in known},
        {key: value for key, value in eagle.items() if key not in eagle_known},
        _carried(raw, eagle),
        kept,
        normed_twice,
        tuple(losses),
        notes,
        left_out,
    )


def _check_kind(raw: RawHead, where: str) -> None:
    if raw.problems:
        raise HeadError(f"{where}: its config contradicts itself: {'; '.join(raw.problems)}")
    architectures = raw.config.get("architectures")
    known = _ARCHITECTURES.get(raw.layout, (raw.schema.architecture,))
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


def _fields(raw: RawHead, target: TargetShape, where: str) -> dict[str, Any]:
    """Every field of the draft, filled in as all readers fill it in, and checked against its target.

    Raises:
        HeadError: one is missing, or is another than the target's.
    """
    width = raw.fields.get("target_hidden_size") or target.hidden_size
    found = raw.schema.filled({**raw.fields, "target_hidden_size": width}, where)
    for key, value in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        if found[key] != value:
            raise HeadError(f"{where}: {key} is {found[key]}, and the target's is {value}")
    return found


def _computes(raw: RawHead, tensors: Mapping[str, Tensor], writer: str | None, where: str) -> dict[str, bool]:
    """Which norms the head applies, every question answered.

    Raises:
        HeadError: its file leaves one open that its readers answer differently.
    """
    flags = raw.flags
    before = flags.norm_before_residual
    if before is None and raw.layout == "speculators":
        raise HeadError(
            f"{where}: norm_before_residual is not said: speculators takes false and vLLM true; "
            "write it into config.json"
        )
    fed_back, norm = flags.norm_output, flags.norm_before_lm_head
    said = raw.config.get("norm_output")
    if raw.layout == "eagle" and said is not None and fed_back is None:
        if writer is None:
            raise HeadError(
                f"{where}: norm_output is {said!r}: to SpecForge it means norm before lm_head, to every "
                "server that the normed output is fed back; say who wrote it (--written-for specforge, or "
                "sglang, ...)"
            )
        if writer == "specforge":
            norm = said
        else:
            fed_back = said
    has_norm = "norm.weight" in tensors
    if not has_norm and norm is not False:
        raise HeadError(f"{where} has no norm.weight; a reader would take ones for it")
    return {
        "norm_before_residual": bool(before),
        "norm_before_fc": bool(flags.norm_before_fc),
        "fc_norm": bool(flags.fc_norm),
        "norm_output": bool(fed_back),
        "norm_before_lm_head": norm is not False,
    }


def _one_norm(names: tuple[str, str], tensors: dict[str, Tensor], layers: int, where: str) -> tuple[str, ...]:
    """Keep one name of the norm at the input of each further layer; say which readers would miss it."""
    notes = []
    for index in range(1, layers):
        ours, other = (f"layers.{index}.{name}.weight" for name in names)
        if ours in tensors and other in tensors and not torch.equal(tensors[ours], tensors[other]):
            raise HeadError(
                f"{where}: {ours} and {other} differ: vLLM and speculators norm with the first, SGLang and "
                "TensorRT-LLM with the second"
            )
        if other in tensors:
            if ours not in tensors:
                notes.append(f"{other} stood alone: vLLM and speculators would have normed with ones")
            tensors.setdefault(ours, tensors[other])
            del tensors[other]
    return tuple(notes)


def _inherited(raw: RawHead) -> list[str]:
    before = raw.config.get(CONVERSION)
    losses = before.get("losses", []) if isinstance(before, dict) else []
    return [str(loss) for loss in losses] if isinstance(losses, list) else []


def _carried(raw: RawHead, eagle: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Keys of one layout alone: found here, or kept by an earlier conversion."""
    before = raw.config.get(CONVERSION)
    kept = before.get("carried", {}) if isinstance(before, dict) else {}
    found = {k: dict(v) for k, v in kept.items() if isinstance(v, dict)} if isinstance(kept, dict) else {}
    for layout, names in keys.owned(raw.schema).items():
        if own := {name: raw.config[name] for name in names if name in raw.config}:
            found[layout] = own
    if own := {name: eagle[name] for name in keys.MODELOPT if name in eagle}:
        found["modelopt"] = own
    return found
