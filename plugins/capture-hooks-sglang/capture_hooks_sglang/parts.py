"""What an SGLang model is made of, by the building blocks that all of SGLang's models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from capture_hooks.errors import BindError


@dataclass(frozen=True, slots=True)
class Parts:
    """Modules of one model, by role.

    Attributes:
        lists: the outermost module lists, by qualified name.
        layers: their elements.
        outside: every module that is neither in a list nor one of the other roles.
        embeddings: token and position embeddings outside the lists.
        norms: modules outside the lists whose class is named a norm.
        logits_processors: SGLang's ``LogitsProcessor`` modules.
        device: where the model is.
    """

    lists: dict[str, nn.ModuleList]
    layers: tuple[nn.Module, ...]
    outside: tuple[nn.Module, ...]
    embeddings: tuple[nn.Module, ...]
    norms: tuple[nn.Module, ...]
    logits_processors: tuple[nn.Module, ...]
    device: torch.device


def parts_of(model: nn.Module) -> Parts:
    """Sort the modules of ``model`` by role.

    Raises:
        BindError: no module list, or layers that another pipeline stage holds.
    """
    from sglang.srt.layers.logits_processor import (
        LogitsProcessor,
    )
    from sglang.srt.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    lists = _outermost_lists(model)
    _refuse_missing(model)
    layers = tuple(element for items in lists.values() for element in items)
    inside = {id(part) for layer in layers for part in layer.modules()} | {id(x) for x in lists.values()}
    rest = [part for part in model.modules() if id(part) not in inside]
    processors = tuple(part for part in rest if isinstance(part, LogitsProcessor))
    embeddings = tuple(
        part
        for part in rest
        if isinstance(part, (nn.Embedding, VocabParallelEmbedding)) and not isinstance(part, ParallelLMHead)
    )
    norms = tuple(part for part in rest if "norm" in type(part).__name__.lower())
    taken = {id(part) for part in (*processors, *embeddings)}
    return Parts(
        lists=lists,
        layers=layers,
        outside=tuple(part for part in rest if id(part) not in taken),
        embeddings=embeddings,
        norms=norms,
        logits_processors=processors,
        device=next(model.parameters()).device,
    )


def _outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inner and len(module):
            found[name] = module
    if not found:
        raise BindError(f"{type(model).__name__} has no torch.nn.ModuleList of decoder layers")
    return found


def _refuse_missing(model: nn.Module) -> None:
    """Pipeline parallelism leaves a placeholder for whatever another stage holds."""
    from sglang.srt.layers.utils import (
        PPMissingLayer,
    )

    missing = [name for name, part in model.named_modules() if isinstance(part, PPMissingLayer)]
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise BindError(
            f"{type(model).__name__} is one stage of a pipeline: {shown} on other ranks, so not every "
            "boundary passes through this process; capture with --pp-size 1 (tensor parallelism works)"
        )


def config_number(model: nn.Module, name: str) -> int | None:
    """A number of the text config, wherever a multimodal config keeps it."""
    config: Any = getattr(model, "config", None)
    for inner in (config, *(getattr(config, n, None) for n in ("text_config", "llm_config"))):
        value = getattr(inner, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
