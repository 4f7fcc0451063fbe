"""A head's norms: what its flags and tensors say together, and where trainers and servers part."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...errors import HeadError
from .contract import RawHead
from .draft import Computes


def computes_of(raw: RawHead, tensors: Mapping[str, Tensor], written_for: str | None, where: str) -> Computes:
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
        if written_for is None:
            raise HeadError(
                f"{where}: norm_output is {said!r}: to SpecForge it means norm before lm_head, to every "
                "server that the normed output is fed back; say who wrote it (--written-for specforge, or "
                "sglang, ...)"
            )
        if written_for.startswith("specforge"):
            norm = said
        else:
            fed_back = said
    has_norm = "norm.weight" in tensors
    if not has_norm and norm is not False:
        raise HeadError(f"{where} has no norm.weight; a reader would take ones for it")
    return Computes(
        norm_before_residual=bool(before),
        norm_before_fc=bool(flags.norm_before_fc),
        fc_norm=bool(flags.fc_norm),
        norm_output=bool(fed_back),
        norm_before_lm_head=norm is not False,
    )


def one_norm(tensors: dict[str, Tensor], layers: int, where: str) -> tuple[str, ...]:
    """Keep one name of the norm at the input of each further layer; say which readers would miss it."""
    notes = []
    for index in range(1, layers):
        ours, other = (f"layers.{index}.{name}.weight" for name in ("input_layernorm", "hidden_norm"))
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


def modelopt_norm(raw: RawHead, written_for: str | None, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """ModelOpt's training norms layer 0's states twice; every server, and every layout, once."""
    if raw.layout != "modelopt" and not (written_for or "").startswith("modelopt"):
        return ()
    return tuple(
        f"{why}. Every server computes hidden_norm(h), as this file keeps it" for why in twice(tensors)
    )


def twice(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What ModelOpt makes of layer 0's norms, where that is not what servers make of them.

    The stock layer hands ``input_layernorm(h)`` to attention, and a hook there norms it again with
    ``hidden_norm`` (0.47.0 ``modeling_eagle.py:113-125``); the residual takes ``h``.  The second norm undoes
    the first one's division, and its gain too where that is one positive number.
    """
    gain = tensors["midlayer.input_layernorm.weight"].float()
    first = gain.flatten()[0]
    if bool(first > 0) and bool((gain == first).all()):
        return ()
    flat = bool((gain == first).all())
    spread = f"vary by {float(gain.std(unbiased=False) / gain.abs().mean()):.1%} of their mean"
    return (
        "ModelOpt 0.41 and later trains with hidden_norm(input_layernorm(h)) at layer 0, and no single norm "
        f"equals the two: the gains of input_layernorm {f'are {first:g}' if flat else spread}",
    )
