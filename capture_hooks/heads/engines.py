"""For which engines, and which versions of them, a head's directory is right, and why not for the others.

No single list of ids satisfies every engine, and some engines ignore settings a head needs.  Where an
engine would compute something else, its ids are written in a form at which it stops while starting,
because leaving them out makes it fall back to its default layers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..conventions import BUILTIN, Conventions, engine_ids
from ..conventions.facts import LIMITS, SPOKEN_FOR
from ..conventions.readers import NESTED, TOP
from ..spec import Point

SGLANG_KEY: Final = NESTED
VLLM_KEY: Final = TOP
#: What marks a refusal in a file.
_CANNOT: Final = "cannot serve this head"


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
    needs = {
        engine: _needed(engine, len(points), fields, tensors) for engine in ("sglang", "vllm", "specforge")
    }
    sglang, vllm = (
        _served(engine, key, points, n_layers, model_type, split, needs[engine], conventions)
        for engine, key in (("sglang", SGLANG_KEY), ("vllm", VLLM_KEY))
    )
    return (
        EngineStatement(engine="embedded", versions=f"capture-hooks {version}"),
        sglang,
        vllm,
        _trained_on("specforge", sglang, needs["specforge"]),
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
        excluded.append(between_layers(engine, model_type))
    return EngineStatement(
        engine=engine,
        versions=SPOKEN_FOR[engine],
        convention=told.convention.name,
        key=key,
        ids=None if excluded else told.ids,
        excluded=excluded,
    )


def between_layers(engine: str, model_type: str) -> str:
    """Why no ids name a state on one side of what a model adds between two layers."""
    return (
        f"{model_type} adds something to the stream between layers, "
        f"where {engine}'s ids do not say on which side"
    )


def _trained_on(engine: str, sglang: EngineStatement, limits: list[str]) -> EngineStatement:
    """A trainer that captures through SGLang, by the same key."""
    excluded = [f"it captures through SGLang, where {why}" for why in sglang.excluded] + limits
    return EngineStatement(
        engine=engine,
        versions=SPOKEN_FOR[engine],
        convention=sglang.convention,
        key=sglang.key,
        ids=None if excluded else sglang.ids,
        excluded=excluded,
    )


def _needed(engine: str, inputs: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """What a head needs and the engine's draft class does not compute, a sentence each."""
    return [
        limit.excluded.format(inputs=inputs)
        for limit in LIMITS
        if limit.engine == engine and _RULES[limit.rule](limit.name, inputs, fields, tensors)
    ]


def later_layers_without(norm: str, tensors: Collection[str]) -> list[int]:
    """Draft layers after the first that carry no ``norm`` (an engine would keep it at ones), ascending."""
    numbers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    later = sorted(int(number) for number in numbers if number.isdecimal() and number[0] != "0")
    return [layer for layer in later if f"layers.{layer}.{norm}.weight" not in tensors]


def _skips_fc(name: str, inputs: int, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    fc = tensors.get("fc.weight")
    if inputs != 1 or fc is None:
        return False
    return not torch.equal(fc, torch.eye(*fc.shape, dtype=fc.dtype, device=fc.device))


#: When a head needs what an engine does not compute, by the rule of its row in ``facts.toml``: from the name
#: that the row is about, the number of inputs, the head's fields and its tensors.
_RULES: Final[Mapping[str, Callable[[str, int, Mapping[str, Any], Mapping[str, Tensor]], bool]]] = {
    "flag": lambda name, inputs, fields, tensors: bool(fields.get(name)),
    "one_input": _skips_fc,
    "later_norm": lambda name, inputs, fields, tensors: bool(later_layers_without(name, tensors)),
    "layer_bias": lambda name, inputs, fields, tensors: bool(
        fields.get("attention_bias") or fields.get("mlp_bias")
    ),
    "fc_bias": lambda name, inputs, fields, tensors: "fc.bias" in tensors,
    "embedding": lambda name, inputs, fields, tensors: "embed_tokens.weight" in tensors,
    "inputs": lambda name, inputs, fields, tensors: inputs != 3,
    "layers": lambda name, inputs, fields, tensors: fields.get("num_hidden_layers", 1) != 1,
}
