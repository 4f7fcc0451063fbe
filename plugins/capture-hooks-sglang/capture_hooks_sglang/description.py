"""The `Anatomy` of a language model of SGLang's: its parts, their names, and how its logits are made."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from capture_hooks.capture.anatomy import Anatomy

from .parts import config_number, parts_of
from .rows import rows_of
from .wiring import follow


def describe(model: nn.Module) -> Anatomy:
    """Find the parts of a model that holds a ``LogitsProcessor`` of SGLang's.

    Raises:
        BindError: naming what was looked for and what was found instead.
    """
    wiring = follow(model, parts_of(model))
    names = {id(module): name for name, module in model.named_modules()}
    processor: Any = wiring.logits_processor
    norm = wiring.final_norm
    return Anatomy(
        model=model,
        decoder=wiring.root,
        decoder_name=names[id(wiring.root)],
        layers=wiring.layers,
        layer_names=tuple(names[id(layer)] for layer in wiring.layers),
        embedding=wiring.embedding,
        final_norm=norm,
        final_norm_name=None if norm is None else names[id(norm)],
        lm_head=wiring.lm_head,
        hidden_size=wiring.hidden_size,
        vocab_size=int(processor.vocab_size),
        layout=wiring.layout,
        split_boundaries=frozenset(_deepstack(model, wiring.root, len(wiring.layers))),
        logit_scale=wiring.scale * float(processor.logit_scale or 1.0),
        logit_softcap=processor.final_logit_softcapping or None,
        readout_gap=wiring.gap,
        rows=rows_of,
    )


def _deepstack(model: nn.Module, decoder: nn.Module, n_layers: int) -> range:
    """Boundaries where the decoder adds visual features between layers (DeepStack, arXiv 2406.04334).

    One set after each of layers 0, 1, …: as many as the model says, else every boundary between layers.
    """
    if not any("deepstack" in name for name in inspect.signature(type(decoder).forward).parameters):
        return range(0)
    levels = config_number(model, "num_deepstack_embeddings")
    levels = getattr(model, "num_deepstack_embeddings", levels)
    return range(1, min(levels, n_layers) + 1 if levels else n_layers)
