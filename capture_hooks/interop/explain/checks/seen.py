"""What each engine sees of a head: its config after that engine's own translation, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ....conventions.facts import ARCHITECTURES, SPECULATORS_TYPES, Draft, draft_of
from ...heads import RawHead
from ...heads.open import read_stored
from ..subject import HeadSubject


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine's view of a head.

    Attributes:
        draft: the draft class it makes.
        config: the config that class reads.
    """

    engine: str
    draft: Draft
    config: Mapping[str, Any]


def seen(subject: HeadSubject) -> tuple[EngineView, ...]:
    """The engines that make a draft of this head, each with what it sees."""
    found = []
    for engine in ARCHITECTURES:
        if subject.head.layout == "speculators":
            told = engine == "vllm" and subject.config.get("speculators_config") is not None
            read = as_vllm_reads(subject.config) if told else None
            view = None if read is None else EngineView("vllm", *read)
        else:
            draft = draft_of(engine, subject.config.get("architectures"))
            view = None if draft is None else EngineView(engine, draft, subject.config)
        if view is not None:
            found.append(view)
    return tuple(found)


def as_vllm_reads(config: Mapping[str, Any]) -> tuple[Draft, dict[str, Any]] | None:
    """The draft class and config that vLLM makes of a speculators head; None where it refuses.

    Source: vLLM 0.32.0 ``transformers_utils/configs/speculators/algos.py:16-86``.
    """
    inner = config.get("transformer_layer_config")
    inner = inner if isinstance(inner, Mapping) else {}
    kind = inner.get("model_type", "llama")
    draft = SPECULATORS_TYPES.get(kind) if isinstance(kind, str) else None
    if draft is None:
        return None
    peagle = config.get("speculators_model_type") == "peagle"
    view = {
        **inner,
        "draft_vocab_size": config.get("draft_vocab_size"),
        "norm_before_residual": config.get("norm_before_residual", not peagle),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    if not peagle:
        view["fc_norm"] = config.get("fc_norm", False)
        view["norm_output"] = config.get("norm_output", False)
    for name in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if config.get(name):
            view[name] = config[name]
    return draft, view


def tensor(head: RawHead, name: str) -> Tensor:
    """One tensor of a head, by canonical name.

    Raises:
        HeadError: its file is damaged.
    """
    stored = head.names[name]
    return read_stored(stored.file, (stored.name,))[stored.name]


def size_of(config: Mapping[str, Any], name: str) -> int | None:
    """A size as an engine's config class takes it: a positive whole number, or None."""
    value = config.get(name)
    return value if type(value) is int and value > 0 else None
