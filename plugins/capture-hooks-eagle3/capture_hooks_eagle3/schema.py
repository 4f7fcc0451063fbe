"""The file of an EAGLE-3 head: the fields of its ``config.json``, how libraries spell them, and its tensors.

What is said here is said nowhere else: a head is saved, loaded, converted and explained by it, through
`capture_hooks.heads.schema.HeadSchema`.  No torch is imported.

Tensors have one *canonical* name:

========================  ==========================================================================
canonical                 others
========================  ==========================================================================
``midlayer.*``            ``layers.0.*`` (speculators, ModelOpt), ``model.layers.0.*``
``layers.N.*``            the same for N >= 1
``fc_norm.0``, ``.1``...  ``aux_norm_low``, ``aux_norm_mid``, ``aux_norm_high`` (older SGLang)
everything else           without a leading ``model.``
========================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from capture_hooks.errors import HeadError

#: RoPE's original base, which every reader takes where a config gives none.
THETA: Final = 10000.0
#: Older SGLang's names of the norms of three inputs (``models/llama_eagle3.py``, ``legacy_name_map``).
_LEGACY: Final = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
#: What a value must be; said of one that is not.
_COUNT, _NUMBER, _OBJECT = "a positive whole number", "a number", "an object"

Count = Annotated[int, Field(ge=1)]
Number = int | float


def _needed(must_be: str) -> Any:
    return Field(description=must_be)


def _optional(must_be: str) -> Any:
    return Field(default=None, description=must_be)


def _flag(*places: str) -> Any:
    """A flag that libraries write at these places of ``config.json``; the first that is there counts."""
    return Field(default=None, validation_alias=AliasChoices(*(AliasPath(*p.split(".")) for p in places)))


def _dotted(info: FieldInfo) -> Iterator[str]:
    """The places of a flag, with dots."""
    assert isinstance(info.validation_alias, AliasChoices)
    for path in info.validation_alias.choices:
        assert isinstance(path, AliasPath)
        yield ".".join(str(part) for part in path.path)


class Eagle3File(BaseModel):
    """The fields of ``config.json`` that decide what an EAGLE-3 head computes.

    Attributes:
        num_key_value_heads, head_dim: where a file does not say, one for each query head, and its share.
        bos_token_id, eos_token_id, pad_token_id: named so that a file says them; a server takes the target's.
        rope_parameters: transformers 5's spelling; transformers 4 has ``rope_theta`` and ``rope_scaling``.
        norm_before_residual: layer 0's residual is ``hidden_norm(h)`` instead of ``h``.
        norm_before_fc: one RMSNorm over the concatenated inputs (``input_norm``).
        fc_norm: one RMSNorm for each input (``fc_norm.i``).
        norm_output: what is fed back is the output after ``norm``, as SGLang, vLLM and speculators mean it.
        norm_before_lm_head: ``norm`` is applied before ``lm_head``.
        use_aux_hidden_state: the head takes intermediate states; false means one final state.
    """

    model_config = ConfigDict(frozen=True, strict=True, populate_by_name=True)

    hidden_size: Count = _needed(_COUNT)
    intermediate_size: Count = _needed(_COUNT)
    num_hidden_layers: Count = _needed(_COUNT)
    num_attention_heads: Count = _needed(_COUNT)
    num_key_value_heads: Count | None = _optional(_COUNT)
    head_dim: Count | None = _optional(_COUNT)
    hidden_act: str
    rms_norm_eps: Number = _needed(_NUMBER)
    max_position_embeddings: Count = _needed(_COUNT)
    vocab_size: Count = _needed(_COUNT)
    attention_bias: bool = False
    mlp_bias: bool = False
    model_type: str = "llama"

    bos_token_id: Any = None
    eos_token_id: Any = None
    pad_token_id: Any = None

    rope_parameters: dict[str, Any] | None = _optional(_OBJECT)
    rope_scaling: dict[str, Any] | None = _optional(_OBJECT)
    rope_theta: Number | None = _optional(_NUMBER)

    draft_vocab_size: Count | None = _optional(_COUNT)
    target_hidden_size: Count | None = _optional(_COUNT)
    num_aux_hidden_states: Count | None = _optional(_COUNT)

    norm_before_residual: bool | None = _flag("norm_before_residual")
    norm_before_fc: bool | None = _flag("eagle_config.norm_before_fc", "norm_before_fc")
    fc_norm: bool | None = _flag("fc_norm", "use_aux_norm")
    norm_output: bool | None = _flag("eagle_config.norm_output", "norm_output")
    norm_before_lm_head: bool | None = _flag("eagle_config.use_last_layernorm")
    use_aux_hidden_state: bool | None = _flag("eagle_config.use_aux_hidden_state", "use_aux_hidden_state")


_NAMES: Final = tuple(Eagle3File.model_fields)
_LAYER: Final = _NAMES[: _NAMES.index("bos_token_id")]
_FLAGS: Final = _NAMES[_NAMES.index("norm_before_residual") :]


class Eagle3Schema:
    """`Eagle3File` and the tensors beside it, as the core asks for them; see `HeadSchema` for each member."""

    architecture: Final = "LlamaForCausalLMEagle3"
    layer_keys: Final = (*_LAYER, "bos_token_id", "eos_token_id", "pad_token_id")
    rope_keys: Final = ("rope_parameters", "rope_scaling", "rope_theta")
    #: Those that every library but SpecForge calls so.
    flag_keys: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    required: Final = (
        "architectures",
        "model_type",
        *_LAYER[: _LAYER.index("vocab_size")],
        "draft_vocab_size",
        *flag_keys,
    )
    places: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {name: tuple(_dotted(Eagle3File.model_fields[name])) for name in _FLAGS}
    )
    settings_key: Final = "eagle3_training"
    later_norms: Final = ("input_layernorm", "hidden_norm")

    def refusal(self, names: Collection[str]) -> str | None:
        if {"fc.weight", "midlayer.hidden_norm.weight"} & set(names):
            return None
        lacks = "neither fc.weight nor the first layer's hidden_norm"
        return f"{lacks}: it is no EAGLE-3 head (is it a whole model?)"

    def canonical(self, name: str) -> str:
        short = name.removeprefix("model.")
        head, _, rest = short.partition(".")
        if head in _LEGACY:
            return f"{_LEGACY[head]}.{rest}"
        return "midlayer." + short.removeprefix("layers.0.") if short.startswith("layers.0.") else short

    def problems(self, fields: Mapping[str, Any]) -> list[str]:
        return [
            f"{name} is {shown}, not {must_be}"
            for kind in (_COUNT, _NUMBER, _OBJECT)
            for name, (check, must_be) in _checks().items()
            if must_be == kind and (shown := _refused(check, fields.get(name)))
        ]

    def filled(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        found = {name: fields.get(name) for name in self.layer_keys}
        needed = [name for name in _LAYER if Eagle3File.model_fields[name].is_required()]
        if missing := [name for name in needed if found[name] is None]:
            raise HeadError(f"{where}: its config gives no {', '.join(missing)}")
        found |= {"model_type": found["model_type"] or "llama", **attention_shape(fields)}
        found |= {bias: bool(found[bias]) for bias in ("attention_bias", "mlp_bias")}
        found["rope_parameters"] = self.rope(fields, where)
        found["draft_vocab_size"] = fields.get("draft_vocab_size") or found["vocab_size"]
        found["target_hidden_size"] = fields.get("target_hidden_size")
        try:
            Eagle3File.model_validate(found)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise HeadError(f"{where}: {name} is {first['input']!r}: {first['msg']}") from None
        return found

    def rope(self, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        new = dict(fields.get("rope_parameters") or {})
        old = dict(fields.get("rope_scaling") or {})
        for settings in (new, old):
            if "type" in settings:
                settings.setdefault("rope_type", settings["type"])
                del settings["type"]
        theta = [s["rope_theta"] for s in (new, old, fields) if s.get("rope_theta") is not None]
        if any(value != theta[0] for value in theta):
            raise HeadError(f"{where}: rope_theta is {theta[0]} and {theta[-1]} in two places of its config")
        scaling = [{k: v for k, v in s.items() if k != "rope_theta"} for s in (new, old)]
        scaling = [{"rope_type": "default", **s} for s in scaling if s]
        if any(s != scaling[0] for s in scaling):
            raise HeadError(
                f"{where}: rope_parameters is {scaling[0]} and rope_scaling {scaling[1]}; readers of one and "
                "of the other would turn the head differently"
            )
        return {
            **(scaling[0] if scaling else {"rope_type": "default"}),
            "rope_theta": theta[0] if theta else THETA,
        }

    def rope_spellings(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
        return {
            "rope_parameters": dict(parameters),
            "rope_theta": parameters.get("rope_theta", THETA),
            "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        }

    def shapes(self, fields: Mapping[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
        # Layer 0 reads [input_layernorm(embedding), hidden_norm(h)], so its q, k and v are 2H wide.
        hidden, inner, head = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
        queries, keys = fields["num_attention_heads"] * head, fields["num_key_value_heads"] * head
        width = inputs * fields["target_hidden_size"]
        found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, width)}
        if fields["norm_before_fc"]:
            found["input_norm.weight"] = (width,)
        if fields["fc_norm"]:
            found |= {f"fc_norm.{i}.weight": (fields["target_hidden_size"],) for i in range(inputs)}
        if fields["norm_before_lm_head"]:
            found["norm.weight"] = (hidden,)
        found["lm_head.weight"] = (fields["draft_vocab_size"], hidden)
        found["embed_tokens.weight"] = (fields["vocab_size"], hidden)
        found["d2t"] = (fields["draft_vocab_size"],)
        for index in range(fields["num_hidden_layers"]):
            layer = f"layers.{index}" if index else "midlayer"
            read = hidden if index else 2 * hidden
            matrices = {
                "self_attn.q_proj": (queries, read),
                "self_attn.k_proj": (keys, read),
                "self_attn.v_proj": (keys, read),
                "self_attn.o_proj": (hidden, queries),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }
            for name, shape in matrices.items():
                found[f"{layer}.{name}.weight"] = shape
                if fields["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                    found[f"{layer}.{name}.bias"] = shape[:1]
            found[f"{layer}.input_layernorm.weight"] = (hidden,)
            if index == 0:
                found[f"{layer}.hidden_norm.weight"] = (hidden,)
            found[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        return found

    def check_shapes(
        self, shapes: Mapping[str, tuple[int, ...]], fields: Mapping[str, Any], inputs: int, where: str
    ) -> None:
        wanted = self.shapes(fields, inputs)
        optional = ("embed_tokens.weight", "d2t")
        if missing := sorted(name for name in wanted if name not in shapes and name not in optional):
            raise HeadError(f"{where} lacks {', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}")
        for name, shape in wanted.items():
            if name in shapes and shapes[name] != shape:
                raise HeadError(
                    f"{where}: {name} is {list(shapes[name])}, and its config asks for {list(shape)}"
                )
        for name, flag in (
            ("input_norm.weight", "norm_before_fc"),
            ("fc_norm.0.weight", "fc_norm"),
            ("midlayer.self_attn.q_proj.bias", "attention_bias"),
            ("midlayer.mlp.gate_proj.bias", "mlp_bias"),
        ):
            if name in shapes and name not in wanted:
                raise HeadError(
                    f"{where} holds {name}, and its config does not say {flag}: readers would leave it out"
                )


SCHEMA: Final = Eagle3Schema()


def attention_shape(fields: Mapping[str, Any]) -> dict[str, Any]:
    """``num_key_value_heads`` and ``head_dim``, as every reader fills them in where a file has none."""
    heads = fields.get("num_attention_heads")
    return {
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
    }


@cache
def _checks() -> Mapping[str, tuple[TypeAdapter[Any], str]]:
    """For each field that is checked: its check, and what its value must be."""
    found = {}
    for name, info in Eagle3File.model_fields.items():
        if info.description is not None:
            kind: Any = Annotated[info.annotation, "", *info.metadata]
            found[name] = (TypeAdapter(kind, config=ConfigDict(strict=True)), info.description)
    return found


def _refused(check: TypeAdapter[Any], value: Any) -> str:
    """A value that is there and cannot be, as text; empty for one that can."""
    try:
        check.validate_python(value) if value is not None else None
    except ValidationError:
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return ""
