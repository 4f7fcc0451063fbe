"""For which engines, and which versions of them, a head's directory is right, and why not for the others.

No single list of ids satisfies every engine, and some engines ignore settings a head needs.  Where an
engine would compute something else, its ids are written in a form at which it stops while starting,
because leaving them out makes it fall back to its default layers without a word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..conventions import BUILTIN, Conventions, engine_ids
from ..spec import Point

SGLANG_KEY: Final = "eagle_config.eagle_aux_hidden_state_layer_ids"
VLLM_KEY: Final = "eagle_aux_hidden_state_layer_ids"
#: The architecture whose reading by the engines the statements are about.
EAGLE3: Final = "LlamaForCausalLMEagle3"
_CANNOT: Final = "cannot serve this head"
#: Versions whose draft class does what is said of it below, where ids have meant the same for longer.
_DRAFT_CLASS: Final = {"sglang": "0.5.23", "vllm": "0.32.0 to 0.33.0"}


class EngineStatement(BaseModel):
    """What one engine makes of the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    versions: str = Field(description="the versions in which this was verified; others are not spoken for")
    convention: str | None = Field(default=None, description="name of the convention the ids were written by")
    key: str | None = Field(default=None, description="where in config.json the engine reads its ids")
    ids: list[int] | None = Field(default=None, description="the ids it reads; null where it is excluded")
    excluded: list[str] = Field(
        default_factory=list, description="why it cannot serve this head; empty if it can"
    )

    @property
    def right(self) -> bool:
        """Whether this engine feeds the head what it was trained on, and computes what it computes."""
        return not self.excluded

    def __str__(self) -> str:
        name = f"{self.engine} {self.versions}"
        if self.right:
            return f"{name}: right" + (f", reads {self.key} = {self.ids}" if self.key else "")
        return f"{name}: excluded, because {'; '.join(self.excluded)}"


def statements(
    points: Sequence[Point],
    n_layers: int,
    model_type: str,
    split: bool,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    version: str,
    conventions: Conventions = BUILTIN,
) -> tuple[EngineStatement, ...]:
    """State for each engine whether it is right, from the points in file order and the head's own fields."""
    sglang = _sglang_limits(len(points), fields, tensors)
    vllm = _vllm_limits(fields, tensors)
    served = _served("sglang", SGLANG_KEY, points, n_layers, model_type, split, sglang, conventions)
    return (
        EngineStatement(engine="embedded", versions=f"capture-hooks {version}"),
        served,
        _served("vllm", VLLM_KEY, points, n_layers, model_type, split, vllm, conventions),
        _read_by_specforge(served, points, fields),
    )


def sglang_ids(statement: EngineStatement) -> Any:
    """The nested value: the ids, or an object at which every SGLang 0.5.23 setter raises.

    ``set_eagle3_layers_to_capture`` iterates, indexes ``[0]`` or takes ``max``: over an object with one
    text key, each ends in a TypeError or KeyError at start-up; the key says why.
    """
    return statement.ids if statement.right else {_refusal(statement): 0}


def vllm_ids(statement: EngineStatement) -> Any:
    """The top-level value: the ids, or a list that vLLM cannot sort, so that it stops at start-up."""
    return statement.ids if statement.right else [_refusal(statement), 0]


def is_refusal(ids: Any) -> bool:
    """Whether ids are what `sglang_ids` or `vllm_ids` write for an engine that cannot serve the head."""
    texts = ids if isinstance(ids, list | dict) else ()
    return any(isinstance(text, str) and _CANNOT in text for text in texts)


def _refusal(statement: EngineStatement) -> str:
    return f"{statement.engine} {statement.versions} {_CANNOT}: {'; '.join(statement.excluded)}"


def _served(
    engine: str,
    key: str,
    points: Sequence[Point],
    n_layers: int,
    model_type: str,
    split: bool,
    limits: list[str],
    conventions: Conventions,
) -> EngineStatement:
    told = engine_ids(engine, points, n_layers, model_type, key, conventions)
    excluded = ([told.excluded] if told.excluded else []) + limits
    if split:
        excluded.append(
            f"{model_type} adds something to the stream between layers, "
            f"where {engine}'s ids do not say on which side"
        )
    return EngineStatement(
        engine=engine,
        versions=_DRAFT_CLASS.get(engine, told.convention.versions),
        convention=told.convention.name,
        key=key,
        ids=None if excluded else told.ids,
        excluded=excluded,
    )


def _read_by_specforge(
    sglang: EngineStatement, points: Sequence[Point], fields: Mapping[str, Any]
) -> EngineStatement:
    """SpecForge 0.2.0 trains on: it captures through SGLang, by the same key.

    What its ``specforge/modeling/draft/llama3_eagle.py`` and ``algorithms/model_providers.py`` do not do.
    """
    excluded = [f"it captures through SGLang, where {why}" for why in sglang.excluded]
    if len(points) != 3:
        excluded.append(f"it takes exactly three inputs, not {len(points)}")
    if fields.get("num_hidden_layers", 1) != 1:
        excluded.append("its draft has one layer")
    if fields.get("norm_before_fc"):
        excluded.append("it has no norm over the whole input")
    if fields.get("norm_output"):
        excluded.append("it feeds back the un-normed output")
    return EngineStatement(
        engine="specforge",
        versions="0.2.0",
        convention=sglang.convention,
        key=sglang.key,
        ids=None if excluded else sglang.ids,
        excluded=excluded,
    )


def _sglang_limits(inputs: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """What ``sglang/srt/models/llama_eagle3.py`` (0.5.23) does not do."""
    found = []
    if fields.get("norm_before_residual"):
        found.append("it ignores norm_before_residual and adds the un-normed state")
    fc = tensors.get("fc.weight")
    if (
        inputs == 1
        and fc is not None
        and not torch.equal(fc, torch.eye(*fc.shape, dtype=fc.dtype, device=fc.device))
    ):
        found.append("it skips fc and every norm before it when the captured width equals the embedding's")
    if _without_norm(tensors, "hidden_norm"):
        found.append(
            "it norms the input of draft layers after the first with hidden_norm, not input_layernorm"
        )
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        found.append("it drops attention and MLP biases")
    if "fc.bias" in tensors:
        found.append("its fc has a bias only together with an attention output bias")
    if "embed_tokens.weight" in tensors:
        found.append("it replaces the head's own embedding by the target's")
    return found


def _vllm_limits(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """What ``vllm/model_executor/models/llama_eagle3.py`` (0.33.0) does not do."""
    found = []
    if _without_norm(tensors, "input_layernorm"):
        found.append(
            "it norms the input of draft layers after the first with input_layernorm, not hidden_norm"
        )
    if "fc.bias" in tensors:
        found.append("its fc has no bias")
    return found


def _without_norm(tensors: Mapping[str, Tensor], norm: str) -> bool:
    """Whether a draft layer after the first carries no ``norm`` (the engine would keep it at ones)."""
    later = {name.split(".")[1] for name in tensors if name.startswith("layers.") and name[7:9] != "0."}
    return any(f"layers.{layer}.{norm}.weight" not in tensors for layer in later)
